"""The forward pass: one step for each equation, from the states of its operands."""
