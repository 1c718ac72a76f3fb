"""Products that are more than a layer: those that cancel, weighted means, matrices that take differences."""
