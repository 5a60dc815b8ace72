"""Small mistakes in the C core, one at a time: the C tests have to notice each of them."""
