"""The only room that knows the inside of JAX: versions, marks in traced programs, walks over them."""
