"""How jaxprs are read: opened, walked along, and what their axes, numbers and conditions say."""
