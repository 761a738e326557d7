"""Builds the compiled parts, which mstar can do without."""

import sys

from setuptools import Extension, setup

FLAGS = [] if sys.platform == "win32" else ["-O3", "-fopenmp", "-Wno-psabi", "-fno-math-errno"]


def extension(module: str) -> Extension:
    """Return an extension of one C file, whose failure does not stop the installation."""
    return Extension(
        module,
        [module.replace(".", "/") + ".c"],
        extra_compile_args=FLAGS,
        extra_link_args=["-fopenmp"] if FLAGS else [],
        optional=True,
    )


setup(
    # Naming the root makes an editable install one entry of the module path. Without it the clone's
    # own folder, which is called mstar too, hides the package from programs beside the clone.
    package_dir={"": "."},
    ext_modules=[
        extension("mstar.engine.resources.attention._paged"),
        extension("mstar.engine.resources.attention._flash"),
        extension("mstar.models._fused"),
        extension("mstar.engine.resources.kv._chain"),
    ],
)
