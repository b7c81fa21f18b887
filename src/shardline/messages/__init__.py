"""What crosses the boundary of a process: frozen msgspec structs, so that msgpack with a declared type is the only wire
format."""
