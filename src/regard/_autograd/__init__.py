"""How a call is differentiated and registered: autograd functions, operators, batching rules."""
