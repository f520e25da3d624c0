"""Version 1 of the contract. The *_pb2 modules beside this file are generated when the package is built."""
