#include "tools/cli/certificate_directory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>
#include <tuple>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/durable_directory.h"
#include "tools/cli/arguments.h"

namespace rekindle::cli {
namespace {

namespace fs = std::filesystem;

// The name of a certificate that all processes of a role share.
constexpr const char* kWholeRole = "*";
constexpr std::array<std::string_view, 4> kRoles = {"coordinator", "agent", "puller", "client"};
constexpr const char* kAuthority = "ca.pem";
constexpr const char* kFormer = "ca-old.pem";
constexpr const char* kNext = "ca-next.pem";
constexpr const char* kTrust = "ca.crt";
constexpr const char* kRevoked = "ca.crl";
constexpr const char* kIssued = "issued";
constexpr mode_t kSecretMode = 0600;
constexpr mode_t kPublicMode = 0644;
constexpr std::size_t kLongestName = 200;
constexpr std::chrono::days kAuthorityLife{3653};

crypto::CertificateTime wall_now() {
  return std::chrono::floor<std::chrono::seconds>(std::chrono::system_clock::now());
}

bool is_there(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

Result<void> write_all(int fd, std::string_view text, const fs::path& path) {
  while (!text.empty()) {
    const ssize_t written = ::write(fd, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return fail_errno(errno, fmt::format("write {}", path.string()));
    text.remove_prefix(static_cast<std::size_t>(written));
  }
  if (::fsync(fd) != 0) return fail_errno(errno, fmt::format("sync {}", path.string()));
  return {};
}

// Never opens what somebody else has put there.
Result<void> replace_file(const fs::path& path, std::string_view text, mode_t mode) {
  const fs::path fresh = path.string() + ".new";
  (void)::unlink(fresh.c_str());
  const UniqueFd fd(::open(fresh.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (!fd) return fail_errno(errno, fmt::format("create {}", fresh.string()));
  // The umask may have taken bits away that readers need.
  if (::fchmod(fd.get(), mode) != 0)
    return fail_errno(errno, fmt::format("chmod {}", fresh.string()));
  TRY_VOID(write_all(fd.get(), text, fresh));
  if (::rename(fresh.c_str(), path.c_str()) != 0) {
    return fail_errno(errno, fmt::format("rename {} to {}", fresh.string(), path.string()));
  }
  const UniqueFd directory(::open(path.parent_path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || (::fsync(directory.get()) != 0 && errno != EINVAL)) {
    return fail_errno(errno, fmt::format("sync {}", path.parent_path().string()));
  }
  return {};
}

Result<crypto::Authority> read_authority(const fs::path& path) {
  TRY(const std::string pem, read_text_file(path));
  auto read = crypto::Authority::from_pem(pem);
  if (!read) return fail(std::move(read).error().with_context(path.string()));
  return read;
}

// `spiffe://TRUST/rekindle/ROLE/NAME`, or without a name.
std::optional<CertificateDirectory::Subject> subject_of(const crypto::CertificateFacts& facts) {
  constexpr std::string_view kPath = "/rekindle/";
  if (facts.uris.empty()) return std::nullopt;
  const std::string& uri = facts.uris.front();
  const auto path = uri.find(kPath);
  if (path == std::string::npos) return std::nullopt;
  const std::string rest = uri.substr(path + kPath.size());
  const auto slash = rest.find('/');
  if (slash == std::string::npos) return CertificateDirectory::Subject{rest, kWholeRole};
  return CertificateDirectory::Subject{rest.substr(0, slash), rest.substr(slash + 1)};
}

bool contains(const std::vector<std::string>& list, const std::string& text) {
  return std::ranges::find(list, text) != list.end();
}

}  // namespace

Result<void> check_trust_domain(const std::string& name) {
  const auto letter = [](char c) { return 'a' <= c && c <= 'z'; };
  const bool plain = std::ranges::all_of(
      name, [&](char c) { return letter(c) || ('0' <= c && c <= '9') || c == '.' || c == '-'; });
  if (plain && name.size() <= 255 && std::ranges::any_of(name, letter) && name.front() != '.' &&
      name.back() != '.') {
    return {};
  }
  return fail(
      ErrorCode::kInvalid,
      "--trust-domain '{}': use at most 255 lower-case letters, digits, dots and dashes, as "
      "in example.org",
      name);
}

Result<void> check_subject(const CertificateDirectory::Subject& subject) {
  if (std::ranges::find(kRoles, subject.role) == kRoles.end()) {
    return fail(ErrorCode::kInvalid, "'{}' is not a role; use coordinator, agent, puller or client",
                subject.role);
  }
  if (subject.name == kWholeRole) return {};
  const bool plain = std::ranges::all_of(subject.name, [](char c) {
    return ('a' <= c && c <= 'z') || ('A' <= c && c <= 'Z') || ('0' <= c && c <= '9') || c == '.' ||
           c == '-' || c == '_';
  });
  const bool dots = subject.name.find_first_not_of('.') == std::string::npos;
  if (plain && !dots && subject.name.size() <= kLongestName) return {};
  return fail(ErrorCode::kInvalid,
              "'{}' is not a name for a certificate; use 1 to {} letters, digits, dots, dashes and "
              "underscores",
              subject.name, kLongestName);
}

Result<void> CertificateDirectory::lock() {
  lock_.reset(::open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!lock_) return fail_errno(errno, path_.string());
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return {};
  if (errno != EWOULDBLOCK) return fail_errno(errno, fmt::format("lock {}", path_.string()));
  return fail(ErrorCode::kUnavailable, "another `rekindle certs` works on {}; try again",
              path_.string());
}

Result<CertificateDirectory> CertificateDirectory::create(const fs::path& path,
                                                          const std::string& trust_domain,
                                                          std::chrono::days life, bool force) {
  TRY_VOID(check_trust_domain(trust_domain));
  TRY_VOID(make_directory_durably(path));
  CertificateDirectory made(path);
  TRY_VOID(made.lock());
  if (is_there(path / kAuthority) && !force) {
    return fail(
        ErrorCode::kInvalid,
        "{} has an authority already; use `rekindle certs rotate {} --ca` for a new one that "
        "hosts trust beside it, or --force to forget it",
        path.string(), path.string());
  }
  made.trust_domain_ = trust_domain;
  made.authorities_.push_back(crypto::Authority::create(trust_domain, wall_now(), life));
  for (const char* file : {kFormer, kNext, kRevoked}) {
    if (::unlink((path / file).c_str()) != 0 && errno != ENOENT) {
      return fail_errno(errno, fmt::format("remove {}", (path / file).string()));
    }
  }
  TRY_VOID(made.write_revocations({}));
  TRY_VOID(made.write_trust());
  // The last file: until it is there, `init` may be repeated.
  TRY_VOID(replace_file(path / kAuthority, made.authorities_.front().to_pem(), kSecretMode));
  return made;
}

Result<CertificateDirectory> CertificateDirectory::open(const fs::path& path) {
  CertificateDirectory opened(path);
  if (!is_there(path / kAuthority)) {
    return fail(ErrorCode::kNotFound, "{} has no ca.pem; make an authority: rekindle certs init {}",
                path.string(), path.string());
  }
  TRY_VOID(opened.lock());
  TRY(auto newest, read_authority(path / kAuthority));
  opened.trust_domain_ = newest.trust_domain();
  opened.authorities_.push_back(std::move(newest));
  if (is_there(path / kFormer)) {
    TRY(auto former, read_authority(path / kFormer));
    // A rotation was interrupted before its last step. It changed nothing that counts.
    if (former.certificate_pem() != opened.authorities_.front().certificate_pem()) {
      opened.authorities_.push_back(std::move(former));
    }
  }
  return opened;
}

fs::path CertificateDirectory::file_of(const Subject& subject) const {
  if (subject.name == kWholeRole) return path_ / (subject.role + ".pem");
  return path_ / (subject.role + "-" + subject.name + ".pem");
}

Result<void> CertificateDirectory::write_trust() {
  std::string bundle;
  for (const crypto::Authority& authority : authorities_) bundle += authority.certificate_pem();
  return replace_file(path_ / kTrust, bundle, kPublicMode);
}

Result<void> CertificateDirectory::write_revocations(const std::vector<std::string>& serials) {
  std::string former;
  if (is_there(path_ / kRevoked)) {
    TRY(former, read_text_file(path_ / kRevoked));
  }
  std::string lists;
  for (const crypto::Authority& authority : authorities_) {
    auto list = authority.revoke(former, serials, wall_now());
    if (!list) {
      return fail(std::move(list).error().with_context((path_ / kRevoked).string()));
    }
    lists += *list;
  }
  return replace_file(path_ / kRevoked, lists, kPublicMode);
}

// The record comes first, so that every certificate in use can be revoked.
Result<void> CertificateDirectory::keep(const Subject& subject, const std::string& pem) {
  TRY(const auto facts, crypto::read_certificate(pem));
  TRY_VOID(make_directory_durably(path_ / kIssued));
  const auto certificate = pem.find("-----BEGIN CERTIFICATE-----");
  TRY_VOID(replace_file(path_ / kIssued / (facts.serial + ".crt"), pem.substr(certificate),
                        kPublicMode));
  return replace_file(file_of(subject), pem, kSecretMode);
}

Result<fs::path> CertificateDirectory::issue(const Request& request) {
  TRY_VOID(check_subject(request.subject));
  const fs::path file = file_of(request.subject);
  if (is_there(file) && !request.force) {
    return fail(ErrorCode::kInvalid,
                "{} exists; use `rekindle certs rotate {}` to renew it, or --force to replace it",
                file.string(), path_.string());
  }
  const std::string of_role =
      fmt::format("spiffe://{}/rekindle/{}", trust_domain_, request.subject.role);
  const crypto::CertificateNames names{
      .uri = request.subject.name == kWholeRole ? of_role : of_role + "/" + request.subject.name,
      .common_name = request.subject.name,
      .dns_names = request.dns_names,
      .addresses = request.addresses};
  TRY(const std::string pem, authorities_.front().issue(names, wall_now(), request.life));
  TRY_VOID(keep(request.subject, pem));
  return file;
}

Result<CertificateDirectory::Entry> CertificateDirectory::read_entry(
    const fs::path& file, const std::vector<std::string>& revoked) const {
  TRY(const std::string pem, read_text_file(file));
  auto facts = crypto::read_certificate(pem);
  if (!facts) return fail(std::move(facts).error().with_context(file.string()));
  const auto subject = subject_of(*facts);
  if (!subject || !check_subject(*subject)) {
    return fail(ErrorCode::kInvalid, "{}: its URI is not spiffe://TRUST/rekindle/ROLE/NAME",
                file.string());
  }
  Entry entry{*subject, std::move(*facts)};
  entry.revoked = contains(revoked, entry.facts.serial);
  entry.of_newest = authorities_.front().issued(pem);
  const fs::path in_use = file_of(entry.subject);
  if (is_there(in_use)) {
    TRY(const std::string used, read_text_file(in_use));
    const auto now_in_use = crypto::read_certificate(used);
    if (!now_in_use) {
      return fail(Error(now_in_use.error()).with_context(in_use.string()));
    }
    entry.current = now_in_use->serial == entry.facts.serial;
  }
  return entry;
}

Result<std::vector<CertificateDirectory::Entry>> CertificateDirectory::list() const {
  TRY(const std::string lists, read_text_file(path_ / kRevoked));
  auto revoked = crypto::revoked_serials(lists);
  if (!revoked) return fail(std::move(revoked).error().with_context((path_ / kRevoked).string()));
  std::vector<Entry> entries;
  std::error_code error;
  for (fs::directory_iterator i(path_ / kIssued, error), end; !error && i != end;
       i.increment(error)) {
    if (i->path().extension() != ".crt") continue;
    TRY(Entry entry, read_entry(i->path(), *revoked));
    entries.push_back(std::move(entry));
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return fail_errno(error.value(), (path_ / kIssued).string());
  }
  std::ranges::sort(entries, {}, [](const Entry& entry) {
    return std::tuple(entry.subject.role, entry.subject.name, entry.facts.ends, entry.facts.serial);
  });
  return entries;
}

Result<std::vector<CertificateDirectory::Subject>> CertificateDirectory::renew(
    std::optional<std::chrono::seconds> within) {
  TRY(const auto entries, list());
  std::vector<Subject> renewed;
  for (const Entry& entry : entries) {
    const std::chrono::seconds life = entry.facts.ends - entry.facts.begins;
    const bool due = entry.facts.ends - wall_now() <= within.value_or(life / 3);
    if (entry.current && !entry.revoked && (due || !entry.of_newest)) {
      const auto whole = std::chrono::round<std::chrono::days>(life);
      TRY_VOID(issue({.subject = entry.subject,
                      .dns_names = entry.facts.dns_names,
                      .addresses = entry.facts.addresses,
                      .life = whole,
                      .force = true}));
      renewed.push_back(entry.subject);
    }
    // What has ended needs no record.
    if (entry.facts.ends < wall_now()) {
      (void)::unlink((path_ / kIssued / (entry.facts.serial + ".crt")).c_str());
    }
  }
  return renewed;
}

// The order makes each step safe to repeat: the new authority counts once it is ca.pem, and hosts
// may have learned of it before.
Result<void> CertificateDirectory::begin_authority_rotation() {
  if (authorities_.size() > 1) {
    return fail(ErrorCode::kInvalid,
                "{} has two authorities; end the former rotation first: rekindle certs rotate {} "
                "--drop-old-ca",
                path_.string(), path_.string());
  }
  if (!is_there(path_ / kNext)) {
    const auto made = crypto::Authority::create(trust_domain_, wall_now(), kAuthorityLife);
    TRY_VOID(replace_file(path_ / kNext, made.to_pem(), kSecretMode));
  }
  TRY(auto next, read_authority(path_ / kNext));
  TRY_VOID(replace_file(path_ / kFormer, authorities_.front().to_pem(), kSecretMode));
  authorities_.insert(authorities_.begin(), std::move(next));
  TRY_VOID(write_trust());
  TRY_VOID(write_revocations({}));
  if (::rename((path_ / kNext).c_str(), (path_ / kAuthority).c_str()) != 0) {
    return fail_errno(errno, fmt::format("rename {}", (path_ / kNext).string()));
  }
  return {};
}

Result<void> CertificateDirectory::end_authority_rotation() {
  if (authorities_.size() < 2) {
    return fail(ErrorCode::kInvalid, "{} has one authority only; there is none to drop",
                path_.string());
  }
  TRY(const auto entries, list());
  for (const Entry& entry : entries) {
    if (entry.current && !entry.revoked && !entry.of_newest) {
      return fail(ErrorCode::kInvalid,
                  "{} is still signed by the former authority; renew it first: rekindle certs "
                  "rotate {}",
                  file_of(entry.subject).string(), path_.string());
    }
  }
  authorities_.pop_back();
  TRY_VOID(write_trust());
  TRY_VOID(write_revocations({}));
  if (::unlink((path_ / kFormer).c_str()) != 0) {
    return fail_errno(errno, fmt::format("remove {}", (path_ / kFormer).string()));
  }
  return {};
}

Result<std::size_t> CertificateDirectory::revoke(const Subject& subject) {
  TRY_VOID(check_subject(subject));
  TRY(const auto entries, list());
  std::vector<std::string> serials;
  bool known = false;
  for (const Entry& entry : entries) {
    if (entry.subject.role != subject.role || entry.subject.name != subject.name) continue;
    known = true;
    if (!entry.revoked && entry.facts.ends > wall_now()) serials.push_back(entry.facts.serial);
  }
  if (!known) {
    return fail(ErrorCode::kNotFound,
                "{} has issued no certificate for {}; see: rekindle certs "
                "list {}",
                path_.string(), subject.text(), path_.string());
  }
  if (!serials.empty()) TRY_VOID(write_revocations(serials));
  return serials.size();
}

}  // namespace rekindle::cli
