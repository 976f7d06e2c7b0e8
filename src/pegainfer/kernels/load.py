"""Finds and loads the cubins that `pegainfer kernels build` made. Nothing is ever compiled here."""

from __future__ import annotations

from pathlib import Path

from pegainfer.kernels.manifest import KernelsError, Manifest, Variant, folders, read_manifest
from pegainfer.runtime.cuda.device import Device
from pegainfer.runtime.cuda.module import Kernel, Module


class KernelLibrary:
    """The kernels of one device, loaded at first use and kept."""

    def __init__(self, device: Device, places: tuple[Path, ...] | None = None) -> None:
        """
        Args:
            places: folders that hold <arch>/manifest.json, searched in order; the package's and the cache's
                if None. Raises KernelsError where none has this GPU's architecture.
        """
        arch = device.info.arch
        found: Manifest | None = None
        for place in places or folders():
            self.folder = place / arch
            found = read_manifest(self.folder)
            if found is not None:
                break
        if found is None:
            raise KernelsError(
                f"no kernels were built for {device.info.name} (sm_{arch})",
                expected=f"{arch}/manifest.json in {' or '.join(map(str, places or folders()))}",
                remedy=f"run: pegainfer kernels build --arch {arch}",
            )
        self.device = device
        self.manifest = found
        self._modules: dict[str, Module] = {}
        self._kernels: dict[str, Kernel] = {}

    def kernel(self, name: str) -> Kernel:
        """Raises KernelsError where the manifest lacks it or its file is gone."""
        kernel = self._kernels.get(name)
        if kernel is not None:
            return kernel
        entry = self.manifest.variant(name)
        if entry is None:
            raise KernelsError(
                f"kernel {name} was not built for sm_{self.manifest.arch}", where=self.folder,
                remedy=f"run: pegainfer kernels build --arch {self.manifest.arch}",
            )  # fmt: skip
        unit, _ = entry
        module = self._modules.get(unit.cubin)
        if module is None:
            path = self.folder / unit.cubin
            try:
                data = path.read_bytes()
            except OSError as e:
                raise KernelsError(
                    f"cubin cannot be read: {e.strerror}", where=path, remedy="run: pegainfer kernels build"
                ) from None
            module = self._modules[unit.cubin] = Module(data, self.device, path)
        kernel = self._kernels[name] = module.kernel(name)
        return kernel

    def variant(self, name: str) -> Variant | None:
        """What the manifest says of a kernel; None if it was not built."""
        entry = self.manifest.variant(name)
        return entry[1] if entry else None
