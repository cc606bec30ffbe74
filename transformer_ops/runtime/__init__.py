"""One eager call: the layout of its modules, the objects of its plan, and its Python steps."""
