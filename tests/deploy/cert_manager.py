"""Makes the Secrets that cert-manager makes of Certificates, with openssl."""
import pathlib

from pods import run

USAGES = {"digital signature": ("keyUsage", "digitalSignature"), "server auth": ("extendedKeyUsage", "serverAuth"),
          "client auth": ("extendedKeyUsage", "clientAuth")}


class CertManager:
    """An authority in a directory of its own."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(mode=0o700)
        self.count = 0
        run("openssl", "req", "-x509", *self._key("ca"), "-out", self.directory / "ca.crt", "-subj", "/CN=Rekindle",
            "-days", "1", "-addext", "keyUsage=critical,keyCertSign,cRLSign")

    def _key(self, name):
        return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout",
                self.directory / f"{name}.key")

    def issue(self, spec):
        """The data of the Secret of a Certificate with this `spec`."""
        self.count += 1
        name = str(self.count)
        names = [*(f"URI:{uri}" for uri in spec.get("uris", [])), *(f"DNS:{host}" for host in spec.get("dnsNames", [])),
                 *(f"IP:{address}" for address in spec.get("ipAddresses", []))]
        uses = {}
        for usage in spec["usages"]:
            extension, value = USAGES[usage]
            uses.setdefault(extension, []).append(value)
        extensions = [f"subjectAltName=critical,{','.join(names)}", "basicConstraints=critical,CA:FALSE",
                      *(f"{extension}={','.join(values)}" for extension, values in uses.items())]
        (self.directory / f"{name}.ext").write_text("\n".join(extensions) + "\n")
        run("openssl", "req", "-new", *self._key(name), "-out", self.directory / f"{name}.csr", "-subj", "/")
        run("openssl", "x509", "-req", "-in", self.directory / f"{name}.csr", "-CA", self.directory / "ca.crt",
            "-CAkey", self.directory / "ca.key", "-set_serial", name, "-days", "1", "-extfile",
            self.directory / f"{name}.ext", "-out", self.directory / f"{name}.crt")
        return {"tls.crt": (self.directory / f"{name}.crt").read_bytes(),
                "tls.key": (self.directory / f"{name}.key").read_bytes(),
                "ca.crt": (self.directory / "ca.crt").read_bytes()}

    def secrets(self, objects):
        """Of all Certificates among the objects, by name."""
        specs = [o["spec"] for o in objects if o["kind"] == "Certificate"]
        return {spec["secretName"]: self.issue(spec) for spec in specs if not spec.get("isCA")}
