"""The operators of the course, one file each; see ``kernels.op`` for what an operator is."""
