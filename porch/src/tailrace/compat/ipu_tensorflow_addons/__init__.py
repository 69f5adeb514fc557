"""`ipu_tensorflow_addons`: layers of the originals beside Keras' own."""

from tailrace.compat.ipu_tensorflow_addons import keras as keras
