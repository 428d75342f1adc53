"""Write the packages' SBOM in CycloneDX format, and the licences for share/doc."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from packages import place, vendored
from packages.description import LICENCE
from packages.target import target
from packages.vendored import Wheel

# Libraries in the static programs, by Debian package: name and licence.
STATIC = {"musl-dev": ("musl", "MIT")}
# SPDX identifiers for the licence names in wheels.
IDENTIFIERS = {"MIT License": "MIT", "BSD": "BSD-3-Clause", "Apache 2.0": "Apache-2.0"}
# Debian has the text of this licence in common-licenses, and Debian's policy forbids copies of the text.
APACHE = """\
On Debian, the text of the Apache License 2.0 is in /usr/share/common-licenses/Apache-2.0.

It is also at https://www.apache.org/licenses/LICENSE-2.0."""


def is_apache(text: str) -> bool:
    return "TERMS AND CONDITIONS FOR USE, REPRODUCTION, AND DISTRIBUTION" in text


def licence(wheel: Wheel) -> str:
    metadata = wheel.metadata()
    name = metadata.get("License-Expression") or metadata.get("License") or ""
    return IDENTIFIERS.get(name, name)


def component(name: str, files: list[Wheel]) -> dict[str, Any]:
    """Describe one distribution, with a hash for each of its wheels."""
    first = files[0]
    purl = f"pkg:pypi/{name}@{first.version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": first.version,
        "purl": purl,
        "licenses": [{"expression": licence(first)}],
        "components": [
            {
                "type": "file",
                "bom-ref": f"{purl}#{wheel.path.name}",
                "name": wheel.path.name,
                "hashes": [{"alg": "SHA-256", "content": wheel.sha256}],
            }
            for wheel in files
        ],
    }


def static(package: str, name: str, expression: str) -> dict[str, Any]:
    """Describe a library of the build machine that is linked into the static programs."""
    version = place.run("dpkg-query", "--show", "--showformat=${Version}", package)
    purl = f"pkg:deb/debian/{package}@{version}?arch={target().debian}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
        "licenses": [{"expression": expression}],
    }


def by_name() -> dict[str, list[Wheel]]:
    wheels: dict[str, list[Wheel]] = {}
    for wheel in vendored.wheels(target()):
        wheels.setdefault(wheel.name, []).append(wheel)
    return wheels


def document() -> dict[str, Any]:
    version = place.version()
    ours = f"pkg:pypi/penroot@{version}"
    parts = [component(name, files) for name, files in by_name().items()]
    parts += [static(package, *row) for package, row in STATIC.items()]
    seconds = place.epoch()
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, f'{ours}#{place.commit()}')}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds)),
            "component": {
                "type": "application",
                "bom-ref": ours,
                "name": "penroot",
                "version": version,
                "purl": ours,
                "licenses": [{"expression": LICENCE}],
                "properties": [{"name": "penroot:commit", "value": place.commit()}],
            },
        },
        "components": parts,
        "dependencies": [{"ref": ours, "dependsOn": [part["bom-ref"] for part in parts]}]
        + [{"ref": part["bom-ref"]} for part in parts],
    }


def text() -> str:
    return json.dumps(document(), indent=2, sort_keys=True) + "\n"


def copyright() -> str:
    """Return debian/copyright (DEP 5) with the licence texts of the wheels."""
    stanzas = [
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n"
        f"Upstream-Name: penroot\nSource: penroot-{place.version()}.tar.gz, of the same release",
        f"Files: *\nCopyright: the penroot authors\nLicense: {LICENCE}",
    ]
    texts: dict[str, str] = {}
    for name, files in by_name().items():
        label = f"{licence(files[0]).replace(' ', '-')}-of-{name}"
        kept = " ".join(f"usr/lib/penroot-package/{pattern}" for pattern in vendored.KEPT[name])
        stanzas.append(f"Files: {kept}\nCopyright: as its licence says\nLicense: {label}")
        texts[label] = "\n\n".join(APACHE if is_apache(words) else words for _, words in files[0].licences())
    for name, expression in STATIC.values():
        label = f"{expression}-of-{name}"
        stanzas.append(f"Files: usr/lib/penroot-package/libexec/*\nCopyright: the authors of {name}\nLicense: {label}")
        texts[label] = (
            f"{name} is linked into the static programs, under the licence with the SPDX identifier {expression}."
        )
    texts[LICENCE] = APACHE
    for label, words in texts.items():
        lines = [f" {line.rstrip()}" if line.strip() else " ." for line in words.strip().splitlines()]
        stanzas.append(f"License: {label}\n" + "\n".join(lines))
    return "\n\n".join(stanzas) + "\n"
