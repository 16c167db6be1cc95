"""The exercises, one module a lab: what is asked, on which inputs, and which mistakes get which hint."""
