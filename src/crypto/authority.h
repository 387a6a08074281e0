#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"

// A certificate authority for fleets that have none. Everything here is PEM in memory; the caller
// keeps the files.
namespace rekindle::crypto {

using CertificateTime = std::chrono::sys_seconds;

// What a certificate says.
struct CertificateFacts {
  // Upper-case hexadecimal digits.
  std::string serial;
  // Of the authority that signed it.
  std::string issuer;
  std::vector<std::string> uris, dns_names, addresses;
  CertificateTime begins, ends;
};
// Reads the first certificate. kInvalid: there is none.
Result<CertificateFacts> read_certificate(const std::string& pem);

// Whom a certificate names.
struct CertificateNames {
  // `spiffe://TRUST/rekindle/ROLE/NAME`.
  std::string uri;
  std::string common_name;
  std::vector<std::string> dns_names, addresses;
};

class Authority {
 public:
  // A new key of ECDSA P-256 and a certificate that it signs itself. It may issue certificates, but
  // no authorities, and no SPIFFE URI of another trust domain.
  static Authority create(const std::string& trust_domain, CertificateTime now,
                          std::chrono::days life);
  // Of to_pem(). kInvalid: the key or the certificate is missing, or they do not belong together.
  static Result<Authority> from_pem(const std::string& pem);
  // The private key, and the certificate.
  std::string to_pem() const;
  std::string certificate_pem() const;
  CertificateFacts facts() const;
  // "" if the certificate names none.
  std::string trust_domain() const;

  // A new key and its certificate, for both ends of a TLS connection. kInvalid: a name cannot stand
  // in a certificate, or the certificate would outlive the authority's.
  Result<std::string> issue(const CertificateNames& names, CertificateTime now,
                            std::chrono::seconds life) const;
  // Whether this authority signed the certificate.
  bool issued(const std::string& certificate_pem) const;

  // A revocation list of this authority, with the entries of the one in `former` (PEM, may hold
  // lists of several authorities, or be empty) and these serials. It is valid as long as the
  // authority.
  Result<std::string> revoke(const std::string& former, const std::vector<std::string>& serials,
                             CertificateTime now) const;

 private:
  struct Parts;
  explicit Authority(std::shared_ptr<const Parts> parts) : parts_(std::move(parts)) {}

  // Immutable, so copies share it.
  std::shared_ptr<const Parts> parts_;
};

// The serials in all revocation lists of a PEM text. kInvalid: it holds something else.
Result<std::vector<std::string>> revoked_serials(const std::string& pem);

}  // namespace rekindle::crypto
