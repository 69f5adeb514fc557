"""`ipu_tensorflow_addons`: layers of the originals that Keras does not have.

In and out: as Keras layers. Rule: built on public Keras; they know nothing of programs or devices.
"""

from tailrace.compat.ipu_tensorflow_addons import keras as keras
