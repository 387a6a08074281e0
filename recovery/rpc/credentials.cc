#include "recovery/rpc/credentials.h"

#include <algorithm>
#include <utility>

#include <unistd.h>

#include "recovery/rpc/address.h"
#include "recovery/rpc/tls.h"
#include "src/base/log.h"
#include "src/base/settings_file.h"
#include "src/crypto/hmac.h"

namespace rekindle::rpc {

namespace {

constexpr std::size_t kMinSecretBytes = 16;
constexpr std::size_t kMaxSecretBytes = 4096;
constexpr std::size_t kMaxKeyBytes = 64 << 10;
constexpr std::size_t kMostSecrets = 2;
constexpr std::chrono::seconds kLookEvery{1};

// Reads in place, so that no other memory has the text.
Result<crypto::SecretBytes> read_small_file(const UniqueFd& fd, const std::string& what,
                                            std::size_t most) {
  crypto::SecretBytes bytes(most + 1);
  std::size_t size = 0;
  while (size < bytes.size()) {
    const ssize_t got = ::read(fd.get(), bytes.data() + size, bytes.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(errno, "read the " + what);
    if (got == 0) break;
    size += static_cast<std::size_t>(got);
  }
  if (size > most) return fail(ErrorCode::kInvalid, "the {} is larger than {} bytes", what, most);
  bytes.resize(size);
  return bytes;
}

std::vector<crypto::Secret> lines_of(std::string_view text) {
  std::vector<crypto::Secret> lines;
  for (std::size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\n', begin), text.size());
    const std::string_view line = text.substr(begin, end - begin);
    begin = end + 1;
    const auto first = line.find_first_not_of(" \t\r");
    if (first == std::string_view::npos) continue;
    lines.emplace_back(line.substr(first, line.find_last_not_of(" \t\r") - first + 1));
  }
  return lines;
}

}  // namespace

Result<crypto::SecretBytes> read_undumped(const std::string& path) {
  TRY(const UniqueFd fd, open_settings_file(path));
  return read_small_file(fd, "file " + path, kMaxKeyBytes);
}

Result<crypto::SecretBytes> read_private_key(const std::string& path) {
  TRY(const UniqueFd fd, open_settings_file(path));
  TRY_VOID(check_private_file(fd.get(), "key file " + path));
  return read_small_file(fd, "key file " + path, kMaxKeyBytes);
}

Result<std::vector<crypto::Secret>> read_secrets(const std::string& path) {
  if (path.empty()) return std::vector<crypto::Secret>();
  TRY(const UniqueFd fd, open_settings_file(path));
  TRY_VOID(check_private_file(fd.get(), "secret file " + path));
  TRY(const crypto::SecretBytes text, read_small_file(fd, "secret file " + path, kMaxSecretBytes));
  auto secrets = lines_of({text.data(), text.size()});
  if (secrets.empty()) secrets.emplace_back();
  for (const crypto::Secret& secret : secrets) {
    const std::string_view revealed = secret.reveal();
    const std::size_t bytes = revealed.size();
    if (revealed.find('\0') != std::string_view::npos) {
      return fail(ErrorCode::kInvalid, "a secret in {} has a byte of value 0: it is not text",
                  path);
    }
    if (bytes >= kMinSecretBytes) continue;
    return fail(ErrorCode::kInvalid,
                "a secret in {} has {} bytes, it needs at least {}; make one with: "
                "openssl rand -hex 32",
                path, bytes, kMinSecretBytes);
  }
  if (secrets.size() > kMostSecrets) {
    return fail(ErrorCode::kInvalid,
                "the secret file {} has {} lines; each is a secret, and {} are accepted at a time",
                path, secrets.size(), kMostSecrets);
  }
  if (secrets.size() == 2 && secrets.front().reveal() == secrets.back().reveal()) {
    return fail(ErrorCode::kInvalid, "both lines of {} are the same secret; leave one out", path);
  }
  return secrets;
}

Result<crypto::Secret> read_secret(const std::string& path) {
  TRY(const std::vector<crypto::Secret> secrets, read_secrets(path));
  if (secrets.size() > 1) {
    return fail(ErrorCode::kInvalid, "the file {} has {} lines, one is wanted", path,
                secrets.size());
  }
  return secrets.empty() ? crypto::Secret() : secrets.front();
}

SharedKey::SharedKey(std::string_view secret)
    : key(crypto::derived_key(secret, "rekindle tls key v1")) {
  const std::string digest = crypto::hmac_sha256(secret, "rekindle key id v1");
  for (std::size_t i = 0; i < 4; ++i) {
    id += fmt::format("{:02x}", static_cast<unsigned char>(digest[i]));
  }
}

Credentials::Credentials(CredentialOptions options) : options_(std::move(options)) {}

Result<std::shared_ptr<Credentials>> Credentials::open(CredentialOptions options) {
  const bool any_file = !options.certificate_file.empty() || !options.key_file.empty() ||
                        !options.authority_file.empty() || !options.revocation_file.empty();
  const bool all_files = !options.certificate_file.empty() && !options.key_file.empty() &&
                         !options.authority_file.empty();
  if (any_file && !all_files) {
    return fail(ErrorCode::kInvalid,
                "--tls-cert, --tls-key and --tls-ca go together: {} is missing",
                options.certificate_file.empty() ? "--tls-cert"
                : options.key_file.empty()       ? "--tls-key"
                                                 : "--tls-ca");
  }
  if (options.admit_protocol_2 && options.secret_file.empty()) {
    return fail(ErrorCode::kInvalid,
                "--admit-protocol-2 needs --secret-file: such peers have no other proof");
  }
  if (!any_file && options.secret_file.empty()) return std::shared_ptr<Credentials>();
  std::shared_ptr<Credentials> credentials(new Credentials(std::move(options)));
  TRY(credentials->secrets_, read_secrets(credentials->options_.secret_file));
  credentials->stamp_ = credentials->stamp();
  TRY(credentials->context_, make_tls_context(credentials->options_, credentials->secrets_));
  credentials->next_look_ = steady_now() + kLookEvery;
  return credentials;
}

std::shared_ptr<Credentials> Credentials::of_secret(const std::string& secret) {
  std::shared_ptr<Credentials> credentials(new Credentials({}));
  credentials->secrets_.emplace_back(secret);
  credentials->context_ = make_tls_context({}, credentials->secrets_).value();
  return credentials;
}

std::string Credentials::stamp() const {
  std::string text;
  for (const std::string* path : {&options_.certificate_file, &options_.key_file,
                                  &options_.authority_file, &options_.revocation_file}) {
    struct stat info {};
    if (path->empty() || ::stat(path->c_str(), &info) != 0) info = {};
    text += fmt::format("{}.{}.{}.{}.{};", info.st_dev, info.st_ino, info.st_size,
                        info.st_mtim.tv_sec, info.st_mtim.tv_nsec);
  }
  return text;
}

std::shared_ptr<const TlsContext> Credentials::context() {
  const std::lock_guard lock(mutex_);
  if (options_.certificate_file.empty() || steady_now() < next_look_) return context_;
  next_look_ = steady_now() + kLookEvery;
  // Taken before the files are read, so a change in between is found the next time.
  std::string now = stamp();
  if (now == stamp_) return context_;
  stamp_ = std::move(now);
  auto read = make_tls_context(options_, secrets_);
  if (read) {
    context_ = std::move(*read);
    log::info("tls.reloaded", "certificate", options_.certificate_file);
  } else {
    log::error("tls.refused", "why", read.error(), "effect",
               "the certificates that were read before stay in use");
  }
  return context_;
}

Result<void> Credentials::reload(const CredentialOptions& options) {
  const std::lock_guard lock(mutex_);
  if (options.secret_file.empty() != secrets_.empty()) {
    return fail(ErrorCode::kInvalid, "--secret-file: to begin or to end its use needs a restart");
  }
  TRY(auto secrets, read_secrets(options.secret_file));
  TRY(context_, make_tls_context(options_, secrets));
  secrets_ = std::move(secrets);
  return {};
}

crypto::Secret Credentials::secret() const {
  const std::lock_guard lock(mutex_);
  return secrets_.empty() ? crypto::Secret() : secrets_.front();
}

Result<bool> is_loopback_address(const std::string& listen) {
  TRY(const auto parsed, HostPort::parse(listen));
  TRY(const auto endpoints, resolve_blocking(parsed));
  return std::ranges::all_of(endpoints, [](const Endpoint& endpoint) {
    const std::string text = to_string(endpoint);
    return text.starts_with("127.") || text.starts_with("[::1]:");
  });
}

Result<void> check_exposure(std::string_view what, const std::string& listen,
                            const std::shared_ptr<Credentials>& credentials, bool insecure) {
  if (insecure || credentials != nullptr) return {};
  TRY(const bool local, is_loopback_address(listen));
  if (local) return {};
  return fail(
      ErrorCode::kDenied,
      "{} would listen on {}, where any host may reach it, and has neither a secret nor a "
      "certificate: give --secret-file FILE (openssl rand -hex 32) or --tls-cert, --tls-key "
      "and --tls-ca; or listen on 127.0.0.1; or trust the network with --insecure",
      what, listen);
}

}  // namespace rekindle::rpc
