#include "recovery/coordinator/audit_log.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fmt/chrono.h>
#include <nlohmann/json.hpp>
#include <openssl/evp.h>
#include <syslog.h>

#include "src/base/log.h"
#include "src/base/text.h"

namespace rekindle::coordinator {

namespace {

using AuditJson = nlohmann::ordered_json;

constexpr std::size_t kLongestLine = 64 << 10;
constexpr std::size_t kLongestText = 512;
constexpr std::uint32_t kLinesOfStrangers = 10;
const std::string kNoLine(64, '0');

std::string sha256_hex(std::string_view text) {
  std::array<unsigned char, 32> digest{};
  EVP_Digest(text.data(), text.size(), digest.data(), nullptr, EVP_sha256(), nullptr);
  std::string hex;
  for (const unsigned char byte : digest) hex += fmt::format("{:02x}", byte);
  return hex;
}

std::string now_utc() {
  const auto now = std::chrono::system_clock::now();
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count();
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:06}Z", fmt::gmtime(micros / 1'000'000),
                     micros % 1'000'000);
}

struct AuditLine {
  std::uint64_t seq = 0;
  std::string prev;
  std::uint64_t lost = 0;
};

Result<AuditLine> parse_line(const std::string& text) {
  const auto json = AuditJson::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto number = [&](const char* key) -> std::optional<std::uint64_t> {
    if (!json.is_object() || !json.contains(key) || !json[key].is_number_unsigned()) return {};
    return json[key].get<std::uint64_t>();
  };
  const auto seq = number("seq");
  if (!seq || !json.contains("prev") || !json["prev"].is_string()) {
    return fail(ErrorCode::kCorrupt, "it is no line of an audit log");
  }
  return AuditLine{*seq, json["prev"].get<std::string>(), number("lost").value_or(0)};
}

// The last line of a file that ends with a whole one; "" for an empty file.
Result<std::string> last_line(int fd, off_t size) {
  const auto want = static_cast<std::size_t>(std::min<off_t>(size, kLongestLine));
  std::string tail(want, '\0');
  const ssize_t got = ::pread(fd, tail.data(), want, size - static_cast<off_t>(want));
  if (got != static_cast<ssize_t>(want)) return fail_errno(errno, "read its end");
  if (tail.empty()) return tail;
  tail.pop_back();
  const std::size_t begin = tail.rfind('\n');
  return begin == std::string::npos ? tail : tail.substr(begin + 1);
}

}  // namespace

bool AuditLog::to_syslog() const { return target_ == "syslog"; }

Result<std::unique_ptr<AuditLog>> AuditLog::open(const std::string& target) {
  std::unique_ptr<AuditLog> log(new AuditLog(target));
  log->hash_ = kNoLine;
  if (log->to_syslog()) {
    ::openlog("rekindle", LOG_PID, LOG_AUTHPRIV);
    return log;
  }
  TRY_VOID(log->open_file(/*continues=*/false));
  return log;
}

// A line without its end was being written when a process died. Nobody has relied on it.
Result<void> AuditLog::open_file(bool continues) {
  const auto problem = [&](const char* what) {
    return fail_errno(errno, fmt::format("{} the audit log {}", what, target_));
  };
  UniqueFd fd(::open(target_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0640));
  if (!fd) return problem("open");
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) return problem("stat");
  if (!S_ISREG(info.st_mode)) {
    return fail(ErrorCode::kInvalid, "the audit log {} is not a regular file", target_);
  }
  off_t size = info.st_size;
  for (char last = '\0'; size > 0; --size) {
    if (::pread(fd.get(), &last, 1, size - 1) != 1) return problem("read");
    if (last == '\n') break;
  }
  if (size < info.st_size && ::ftruncate(fd.get(), size) != 0) return problem("cut");
  if (size > 0 && !continues) {
    TRY(const std::string text, last_line(fd.get(), size));
    auto line = parse_line(text);
    if (!line) {
      return fail(ErrorCode::kInvalid, "the last line of {} is none of an audit log; move the file",
                  target_);
    }
    next_ = line->seq + 1;
    hash_ = sha256_hex(text);
  }
  fd_ = std::move(fd);
  return {};
}

Result<void> AuditLog::reopen() {
  if (to_syslog()) return {};
  struct stat before {};
  struct stat now {};
  const bool same = ::fstat(fd_.get(), &before) == 0 && ::stat(target_.c_str(), &now) == 0 &&
                    before.st_ino == now.st_ino && before.st_dev == now.st_dev;
  if (same) return {};
  return open_file(/*continues=*/true);
}

Result<void> AuditLog::put(const AuditEntry& entry) {
  const auto text = [](const std::string& of) { return std::string(cut_text(of, kLongestText)); };
  AuditJson json{{"time", now_utc()}, {"seq", next_}, {"act", entry.act}};
  if (!entry.object.empty()) json["object"] = text(entry.object);
  json["result"] = text(entry.result);
  if (!entry.principals.empty()) {
    AuditJson principals = AuditJson::array();
    for (const auto& each : entry.principals) {
      if (principals.size() < 8) principals.push_back(text(each));
    }
    json["principals"] = std::move(principals);
  }
  if (!entry.role.empty()) json["role"] = entry.role;
  if (!entry.node.empty()) json["node"] = text(entry.node);
  if (!entry.address.empty()) json["address"] = entry.address;
  if (skipped_ > 0) json["skipped"] = skipped_;
  if (lost_ > 0) json["lost"] = lost_;
  json["prev"] = hash_;
  // A name that is no UTF-8 must not stop the log.
  const std::string line = json.dump(-1, ' ', false, AuditJson::error_handler_t::replace);
  if (to_syslog()) {
    ::syslog(LOG_NOTICE, "%s", line.c_str());
  } else {
    struct stat info {};
    if (::fstat(fd_.get(), &info) != 0) return fail_errno(errno, "stat");
    const std::string whole = line + "\n";
    const ssize_t written = ::write(fd_.get(), whole.data(), whole.size());
    if (written != static_cast<ssize_t>(whole.size())) {
      const int why = written < 0 ? errno : ENOSPC;
      // What comes next must not continue half a line.
      if (written > 0 && ::ftruncate(fd_.get(), info.st_size) != 0) return fail_errno(errno, "cut");
      return fail_errno(why, "write");
    }
  }
  ++next_;
  hash_ = sha256_hex(line);
  lost_ = skipped_ = 0;
  return {};
}

void AuditLog::write(const AuditEntry& entry) {
  if (const auto done = put(entry); !done) {
    if (lost_++ == 0) {
      log::error("audit.lost", "log", target_, "why", done.error(), "act", entry.act, "effect",
                 "acts are refused until the log can be written");
    }
  }
}

void AuditLog::write_some(AuditEntry entry, TimePoint now) {
  if (now - second_ >= std::chrono::seconds(1)) {
    second_ = now;
    recent_ = 0;
  }
  if (++recent_ <= kLinesOfStrangers) return write(entry);
  ++skipped_;
}

Result<void> AuditLog::check() {
  if (lost_ == 0) return {};
  AuditEntry again;
  again.act = "audit_resumed";
  if (auto done = put(again); !done) {
    return fail(ErrorCode::kExhausted,
                "the audit log {} cannot be written: {}; nothing was changed: make room, then "
                "try again",
                target_, done.error().message());
  }
  return {};
}

Result<AuditChain> verify_audit(const std::vector<std::filesystem::path>& files) {
  AuditChain chain;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    if (!stream) return fail_errno(errno, "open the audit log " + file.string());
    std::string text;
    for (std::uint64_t number = 1; std::getline(stream, text); ++number) {
      const auto broken = [&](const std::string& why) {
        return fail(ErrorCode::kCorrupt, "{}:{}: {}", file.string(), number, why);
      };
      const auto line = parse_line(text);
      if (!line) return broken(line.error().message());
      if (stream.eof()) return broken("the line has no end");
      const bool is_first = chain.lines == 0;
      if (!is_first && line->seq != chain.last + 1) {
        return broken(fmt::format("line {} follows line {}: lines are missing, or in another order",
                                  line->seq, chain.last));
      }
      if (!is_first && line->prev != chain.hash) {
        return broken(fmt::format("line {} was changed after it was written", chain.last));
      }
      if (is_first) chain.first = line->seq;
      chain.last = line->seq;
      chain.lost += line->lost;
      chain.hash = sha256_hex(text);
      ++chain.lines;
    }
  }
  return chain;
}

}  // namespace rekindle::coordinator
