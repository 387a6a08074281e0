#include "recovery/rpc/grants.h"

#include <array>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "recovery/rpc/convert.h"
#include "src/base/unique_fd.h"
#include "src/crypto/bound_text.h"
#include "src/crypto/hmac.h"

namespace rekindle::rpc {

namespace {

constexpr std::size_t kMinSecretBytes = 16;
constexpr std::size_t kMaxSecretBytes = 4096;

constexpr std::string_view kAuthenticated = "rekindle grant v2";
constexpr std::string_view kSigned = "rekindle grant v3";

std::string grant_text(std::string_view label, const proto::Grant& grant) {
  crypto::BoundText text(label);
  text.bytes(grant.puller_incarnation()).bytes(grant.source_incarnation());
  text.bytes(grant.root().value());
  text.bytes(grant.issuer()).u64(grant.expiry_ms());
  text.u64(grant.max_bytes_per_second()).u64(grant.serial()).u64(grant.epoch());
  return std::move(text).take();
}

Result<std::string> read_small_file(const UniqueFd& fd, const std::string& path) {
  std::string text;
  std::array<char, 1024> chunk;
  for (;;) {
    const ssize_t got = ::read(fd.get(), chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(errno, fmt::format("read the secret file {}", path));
    if (got == 0) return text;
    text.append(chunk.data(), static_cast<std::size_t>(got));
    if (text.size() > kMaxSecretBytes) {
      return fail(ErrorCode::kInvalid, "the secret file {} is larger than {} bytes", path,
                  kMaxSecretBytes);
    }
  }
}

}  // namespace

Result<std::string> read_secret(const std::string& path) {
  if (path.empty()) return std::string();
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return fail_errno(errno, fmt::format("open the secret file {}", path));
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return fail_errno(errno, fmt::format("stat {}", path));
  if (!S_ISREG(info.st_mode)) {
    return fail(ErrorCode::kInvalid, "the secret file {} is not a regular file", path);
  }
  // Only root can give a file of root to a group. systemd and Kubernetes hand secrets over like
  // that.
  const mode_t forbidden = info.st_uid == 0 ? 037 : 077;
  if ((info.st_mode & forbidden) != 0) {
    return fail(ErrorCode::kDenied,
                "the secret file {} is open to other users (mode {:o}); run: chmod 600 {}", path,
                info.st_mode & 07777, path);
  }
  TRY(std::string text, read_small_file(fd, path));
  const auto begin = text.find_first_not_of(" \t\r\n");
  const auto end = text.find_last_not_of(" \t\r\n");
  text = begin == std::string::npos ? std::string() : text.substr(begin, end - begin + 1);
  if (text.size() < kMinSecretBytes) {
    return fail(ErrorCode::kInvalid,
                "the secret in {} has {} bytes, it needs at least {}; make one with: "
                "openssl rand -hex 32",
                path, text.size(), kMinSecretBytes);
  }
  return text;
}

void sign_grant(proto::Grant& grant, const Identity& issuer) {
  if (issuer.key != nullptr) grant.set_signature(issuer.key->sign(grant_text(kSigned, grant)));
  grant.set_mac(crypto::hmac_sha256(issuer.secret, grant_text(kAuthenticated, grant)));
}

Result<void> check_grant(const proto::Grant& grant, std::string_view issuer_key,
                         std::string_view secret, const GrantCheck& check) {
  if (!issuer_key.empty()) {
    if (!crypto::verify(issuer_key, grant_text(kSigned, grant), grant.signature())) {
      return fail(ErrorCode::kDenied, "the grant is not signed by the coordinator that it names");
    }
  } else if (!crypto::equal_constant_time(
                 grant.mac(), crypto::hmac_sha256(secret, grant_text(kAuthenticated, grant)))) {
    return fail(ErrorCode::kDenied,
                "the grant is not signed with this cluster's secret; do all parties use the same "
                "secret file?");
  }
  if (grant.source_incarnation() != check.source.to_bytes()) {
    return fail(ErrorCode::kStale, "the grant is for an earlier life of this source; ask again");
  }
  if (grant.puller_incarnation() != check.puller.to_bytes()) {
    return fail(ErrorCode::kDenied, "the grant belongs to another puller");
  }
  if (from_proto(grant.root()) != check.root) {
    return fail(ErrorCode::kDenied, "the grant is for checkpoint root {}, not {}",
                from_proto(grant.root()).hex(), check.root.hex());
  }
  return {};
}

}  // namespace rekindle::rpc
