"""ATen operations in JAX, by kinds: importing a file registers what it has.

arithmetic       of two arrays, and comparisons
functions        elementwise, of one array
activations      also softmax
reductions       sums, means, extremes, norms
ordering         sorts, the largest few, running sums
shapes           views, parts, borders
new_arrays       constants, sequences, casts
indexing         entries read and written by indices, embeddings
matrices         products, solutions, factors
convolutions     also patches
pools            averages and maxima over windows
normalisations   over a layer, groups, a batch
losses           those that stay whole
resizing         of images
fourier          transforms
backwards        backward passes that stand in a graph
    effects          what is done in order
"""
