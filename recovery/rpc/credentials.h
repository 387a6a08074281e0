#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/crypto/secret_memory.h"

struct ssl_ctx_st;

namespace rekindle::rpc {

// Where a process finds the proof of its identity. Empty paths: it has none.
struct CredentialOptions {
  // PEM: the certificate and its chain, its key, the authorities of the fleet, and their revocation
  // lists. The first three go together.
  std::string certificate_file;
  std::string key_file;
  std::string authority_file;
  std::string revocation_file;
  // One or two cluster secrets, one per line.
  std::string secret_file;
  // Talks to peers of protocol 2, which prove the cluster secret without TLS.
  bool admit_protocol_2 = false;
  // The network is trusted: also talks to peers that prove nothing.
  bool insecure = false;
};

// Reads a file of mode 0600 with 16 to 4096 bytes. Each line is a secret of at least 16 bytes
// without surrounding white space. A third one is an error. Returns none for an empty path.
Result<std::vector<crypto::Secret>> read_secrets(const std::string& path);
// The same of a file with one secret. Returns an empty one for an empty path.
Result<crypto::Secret> read_secret(const std::string& path);

// Reads a file of at most 64 KiB with a private key. No other memory has a copy of it.
Result<crypto::SecretBytes> read_undumped(const std::string& path);
// The same of a file that others may not read.
Result<crypto::SecretBytes> read_private_key(const std::string& path);

// A cluster secret as the pre-shared key of TLS.
struct SharedKey {
  explicit SharedKey(std::string_view secret);
  // 8 hexadecimal digits. Both ends print it; it tells nothing about the secret.
  std::string id;
  // 32 bytes.
  crypto::Secret key;
};

// What new TLS connections use. Immutable, so connections keep it while newer ones replace it.
struct TlsContext {
  struct Free {
    void operator()(ssl_ctx_st* context) const;
  };
  std::unique_ptr<ssl_ctx_st, Free> caller;
  std::unique_ptr<ssl_ctx_st, Free> server;
  std::vector<SharedKey> shared_keys;
  bool has_certificate = false;
  // Of our certificate, as in Peer::principals.
  std::vector<std::string> principals;
  // Of our certificate, in seconds since 1970.
  std::int64_t not_before_s = 0;
  std::int64_t not_after_s = 0;
};

// Certificates and secrets of this process. Changed certificate files are found here, secrets are
// read again when somebody says so. Any thread.
class Credentials {
 public:
  // nullptr: the options name neither certificate nor secret. kInvalid, kDenied, kNotFound: a file
  // is not what it should be.
  static Result<std::shared_ptr<Credentials>> open(CredentialOptions options);
  // Without files.
  static std::shared_ptr<Credentials> of_secret(const std::string& secret);

  // Looks at the files at most once a second. A file that cannot be used changes nothing, and is
  // logged once.
  std::shared_ptr<const TlsContext> context();
  // Reads the secrets again, perhaps from another file. After an error nothing has changed. Options
  // without any proof, or with other certificate files, are an error: they need a restart.
  Result<void> reload(const CredentialOptions& options);
  // The first secret; empty: none.
  crypto::Secret secret() const;
  bool admits_protocol_2() const { return options_.admit_protocol_2; }
  bool admits_strangers() const { return options_.insecure; }

 private:
  explicit Credentials(CredentialOptions options);
  std::string stamp() const;

  // secret_file: guarded by mutex_; the others are fixed.
  CredentialOptions options_;
  mutable std::mutex mutex_;
  // The mutex guards all members that follow.
  std::vector<crypto::Secret> secrets_;
  std::shared_ptr<const TlsContext> context_;
  // Of the certificate files: changes when they do.
  std::string stamp_;
  TimePoint next_look_{};
};

// Whether all addresses of "host:port" are of this host alone.
Result<bool> is_loopback_address(const std::string& listen);
// kDenied: `listen` is not loopback, and nothing would show who calls. `what` names the daemon.
Result<void> check_exposure(std::string_view what, const std::string& listen,
                            const std::shared_ptr<Credentials>& credentials, bool insecure);

}  // namespace rekindle::rpc
