"""A program in half precision, evaluated in float32 with each of its roundings as something to differentiate."""
