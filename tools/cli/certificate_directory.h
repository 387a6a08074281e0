#pragma once

#include <chrono>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/crypto/authority.h"

namespace rekindle::cli {

// The directory of a fleet's certificate authority:
//
//   ca.pem           its key and certificate, 0600
//   ca.crt           the certificates that hosts trust, the newest first
//   ca.crl           the revocation list of each of these authorities
//   ca-old.pem       during a rotation: the former authority, 0600
//   ca-next.pem      for a moment: the next one
//   ROLE-NAME.pem    the key and certificate of one process or person, 0600
//   ROLE.pem         those of all processes of a role
//   issued/SERIAL.crt  every certificate that was issued and has not ended
//
// Key and certificate share a file, so that one rename replaces both. Each file is replaced by a
// rename: a reader sees the old one or the new one. A directory has one user at a time.
class CertificateDirectory {
 public:
  struct Subject {
    std::string role;
    // "*": all processes of the role share the certificate.
    std::string name;
    std::string text() const { return role + " " + name; }
  };
  struct Entry {
    Subject subject;
    crypto::CertificateFacts facts;
    bool revoked = false;
    // ROLE-NAME.pem has this certificate.
    bool current = false;
    // The newest authority signed it.
    bool of_newest = false;
  };
  struct Request {
    Subject subject;
    std::vector<std::string> dns_names, addresses;
    std::chrono::days life{};
    // Replaces the certificate that is there.
    bool force = false;
  };

  // Makes the directory and the authority. kInvalid: there is one.
  static Result<CertificateDirectory> create(const std::filesystem::path& path,
                                             const std::string& trust_domain,
                                             std::chrono::days life, bool force);
  static Result<CertificateDirectory> open(const std::filesystem::path& path);

  const std::string& trust_domain() const { return trust_domain_; }
  crypto::CertificateFacts authority() const { return authorities_.front().facts(); }
  std::filesystem::path file_of(const Subject& subject) const;

  Result<std::filesystem::path> issue(const Request& request);
  // Each is renewed for as long as it was issued for, if it ends within `within` (nullopt: a third
  // of its life), or if a former authority signed it.
  Result<std::vector<Subject>> renew(std::optional<std::chrono::seconds> within);
  // Hosts must trust both authorities before they meet a certificate of the new one.
  Result<void> begin_authority_rotation();
  Result<void> end_authority_rotation();
  // Revokes all certificates of the subject that have not ended. Returns how many.
  Result<std::size_t> revoke(const Subject& subject);
  Result<std::vector<Entry>> list() const;

 private:
  explicit CertificateDirectory(std::filesystem::path path) : path_(std::move(path)) {}
  Result<void> lock();
  Result<void> write_trust();
  Result<void> write_revocations(const std::vector<std::string>& serials);
  Result<void> keep(const Subject& subject, const std::string& pem);
  Result<Entry> read_entry(const std::filesystem::path& file,
                           const std::vector<std::string>& revoked) const;

  std::filesystem::path path_;
  UniqueFd lock_;
  std::string trust_domain_;
  // The newest first. During a rotation there are two.
  std::vector<crypto::Authority> authorities_;
};

// kInvalid: a text that cannot be the name of a trust domain, or of a subject.
Result<void> check_trust_domain(const std::string& name);
Result<void> check_subject(const CertificateDirectory::Subject& subject);

}  // namespace rekindle::cli
