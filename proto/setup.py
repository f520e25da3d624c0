"""Generates the Python stubs beside the .proto files whenever the package is built or installed (also with -e)."""

from importlib import resources
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

PROTO_ROOT = Path(__file__).resolve().parent


def generate_stubs() -> None:
    """Runs protoc over every .proto file; writes *_pb2.py, *_pb2.pyi and, for the service, *_pb2_grpc.py."""
    from grpc_tools import protoc

    well_known_types = resources.files("grpc_tools") / "_proto"
    google_rpc = Path(str(resources.files("google.rpc") / "status.proto")).parents[2]
    sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("likeness/**/*.proto"))
    arguments = ["protoc", f"-I{PROTO_ROOT}", f"-I{well_known_types}", f"-I{google_rpc}"]
    arguments += [f"--python_out={PROTO_ROOT}", f"--pyi_out={PROTO_ROOT}"]
    if protoc.main([*arguments, *sources]) != 0:
        raise RuntimeError(f"protoc failed on {', '.join(sources)}")
    services = [source for source in sources if source.endswith("_service.proto")]
    if protoc.main([*arguments, f"--grpc_python_out={PROTO_ROOT}", *services]) != 0:
        raise RuntimeError(f"protoc failed on the services of {', '.join(services)}")


class BuildWithStubs(build_py):
    """build_py that generates the stubs first, so that they are collected like any other module."""

    def run(self) -> None:
        generate_stubs()
        super().run()


setup(cmdclass={"build_py": BuildWithStubs})
