"""`ipu_tensorflow_addons`: layers of the originals that Keras does not have."""

from tailrace.compat.ipu_tensorflow_addons import keras as keras
