"""Test inputs of every op, for any device: ragged, empty, one token, permuted block tables, garbage in
unused blocks. Each generator is ``cases(place, dtype, seed) -> Iterator[Case]``;
``drivetrain.ops.reference`` binds them.
"""
