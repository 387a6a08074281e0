#include "recovery/rpc/audit_log.h"

#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <deque>
#include <fstream>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <fmt/chrono.h>
#include <nlohmann/json.hpp>
#include <openssl/evp.h>
#include <paths.h>
#include <syslog.h>

#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/text.h"
#include "src/base/unique_fd.h"
#include "src/base/worker_pool.h"

namespace rekindle::rpc {

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

// Of a line that is too long, only its beginning. False: the stream has ended.
bool next_line(std::istream& stream, std::string& text) {
  text.clear();
  for (char c = 0; text.size() <= kLongestLine && stream.get(c);) {
    if (c == '\n') return true;
    text += c;
  }
  return !text.empty();
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

// Brings what was appended to its place. `flush` runs on the thread of this object, which it keeps
// busy only while something is new. The destructor flushes.
class Flusher {
 public:
  using Then = std::function<void(Result<void>)>;

  explicit Flusher(std::function<Result<void>()> flush)
      : flush_(std::move(flush)), thread_([this] { run(); }) {}
  ~Flusher() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  void appended() {
    {
      const std::lock_guard lock(mutex_);
      is_new_ = true;
    }
    changed_.notify_one();
  }
  void when_flushed(Then then) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(then));
    }
    changed_.notify_one();
  }
  // Of the last flush.
  Result<void> outcome() const {
    const std::lock_guard lock(mutex_);
    return outcome_;
  }

 private:
  void run() {
    set_thread_name("rk-audit");
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return stopping_ || is_new_ || !waiting_.empty(); });
      if (!is_new_ && waiting_.empty()) return;
      const bool was_new = std::exchange(is_new_, false);
      const auto waiting = std::exchange(waiting_, {});
      // Without new lines the last outcome still holds.
      if (was_new) {
        lock.unlock();
        auto done = flush_();
        lock.lock();
        outcome_ = std::move(done);
      }
      const Result<void> outcome = outcome_;
      lock.unlock();
      for (const Then& then : waiting) then(outcome);
      lock.lock();
    }
  }

  const std::function<Result<void>()> flush_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // The mutex guards the members up to the thread.
  std::vector<Then> waiting_;
  Result<void> outcome_;
  bool is_new_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

// The chain up to the last line of a file.
struct Chained {
  std::uint64_t next = 1;
  std::string hash = kNoLine;
};

}  // namespace

class AuditLog::Sink {
 public:
  virtual ~Sink() = default;
  virtual Result<void> append(const std::string& line) = 0;
  // On the flusher's thread.
  virtual Result<void> flush() = 0;
  virtual Result<void> reopen() { return {}; }
};

namespace {

class FileSink final : public AuditLog::Sink {
 public:
  explicit FileSink(std::string path) : path_(std::move(path)) {}

  // Without `chained` the file may hold any whole lines. A line without its end was being written
  // when a process died. Nobody has relied on it.
  Result<void> open(Chained* chained) {
    UniqueFd fd(::open(path_.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0640));
    if (!fd) return problem("open");
    struct stat info {};
    if (::fstat(fd.get(), &info) != 0) return problem("stat");
    if (!S_ISREG(info.st_mode)) {
      return fail(ErrorCode::kInvalid, "the audit log {} is not a regular file", path_);
    }
    off_t size = info.st_size;
    for (char last = '\0'; size > 0; --size) {
      if (::pread(fd.get(), &last, 1, size - 1) != 1) return problem("read");
      if (last == '\n') break;
    }
    if (size < info.st_size && ::ftruncate(fd.get(), size) != 0) return problem("cut");
    if (chained != nullptr) {
      TRY(*chained, size > 0 ? chain_of(fd.get(), size, path_) : chain_of_rotated());
    }
    const std::lock_guard lock(mutex_);
    if (fd_ != nullptr) unsynced_.push_back(std::move(fd_));
    fd_ = std::make_shared<const UniqueFd>(std::move(fd));
    is_new_entry_ = true;
    return {};
  }

  Result<void> append(const std::string& line) override {
    struct stat info {};
    if (::fstat(fd_->get(), &info) != 0) return fail_errno(errno, "stat");
    const std::string whole = line + "\n";
    const ssize_t written = ::write(fd_->get(), whole.data(), whole.size());
    if (written == static_cast<ssize_t>(whole.size())) return {};
    const int why = written < 0 ? errno : ENOSPC;
    // What comes next must not continue half a line.
    if (written > 0 && ::ftruncate(fd_->get(), info.st_size) != 0) return fail_errno(errno, "cut");
    return fail_errno(why, "write");
  }

  Result<void> flush() override {
    std::vector<std::shared_ptr<const UniqueFd>> files;
    bool is_new_entry = false;
    {
      const std::lock_guard lock(mutex_);
      files = std::exchange(unsynced_, {});
      files.push_back(fd_);
      is_new_entry = std::exchange(is_new_entry_, false);
    }
    TRY_VOID(failpoint("audit.sync"));
    for (const auto& file : files) {
      if (::fdatasync(file->get()) != 0) return fail_errno(errno, "fdatasync");
    }
    return is_new_entry ? sync_directory() : Result<void>();
  }

  Result<void> reopen() override {
    struct stat before {};
    struct stat now {};
    const bool same = ::fstat(fd_->get(), &before) == 0 && ::stat(path_.c_str(), &now) == 0 &&
                      before.st_ino == now.st_ino && before.st_dev == now.st_dev;
    return same ? Result<void>() : open(nullptr);
  }

 private:
  Failure problem(const char* what) const {
    return fail_errno(errno, fmt::format("{} the audit log {}", what, path_));
  }
  static Result<Chained> chain_of(int fd, off_t size, const std::string& path) {
    TRY(const std::string text, last_line(fd, size));
    const auto line = parse_line(text);
    if (line) return Chained{line->seq + 1, sha256_hex(text)};
    return fail(ErrorCode::kInvalid, "the last line of {} is none of an audit log; move the file",
                path);
  }
  // logrotate may have moved the file while nobody wrote to it.
  Result<Chained> chain_of_rotated() const {
    const std::string path = path_ + ".1";
    const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    struct stat info {};
    if (!fd || ::fstat(fd.get(), &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) {
      return Chained();
    }
    return chain_of(fd.get(), info.st_size, path);
  }
  Result<void> sync_directory() const {
    const auto parent = std::filesystem::absolute(path_).parent_path();
    const UniqueFd fd(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!fd || ::fsync(fd.get()) != 0) return fail_errno(errno, "fsync " + parent.string());
    return {};
  }

  const std::string path_;
  std::mutex mutex_;
  // The owner changes `fd_` under the mutex; the flusher's thread reads it there. The mutex guards
  // the others.
  std::shared_ptr<const UniqueFd> fd_;
  std::vector<std::shared_ptr<const UniqueFd>> unsynced_;
  bool is_new_entry_ = false;
};

// syslog(3) tells nobody that a line was lost, and may wait for ever.
class SyslogSink final : public AuditLog::Sink {
 public:
  explicit SyslogSink(std::string path) : path_(std::move(path)) {}

  Result<void> connect() {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path_.size() >= sizeof address.sun_path) {
      return fail(ErrorCode::kInvalid, "syslog:{}: the path is longer than {} bytes", path_,
                  sizeof address.sun_path - 1);
    }
    path_.copy(address.sun_path, path_.size());
    UniqueFd fd(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!fd) return fail_errno(errno, "make a socket for syslog");
    const timeval patience{kPatience.count(), 0};
    (void)::setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      return fail_errno(errno, "connect to syslog at " + path_);
    }
    fd_ = std::move(fd);
    return {};
  }

  Result<void> append(const std::string& line) override {
    const std::lock_guard lock(mutex_);
    if (lines_.size() >= kMostLines) {
      return fail(ErrorCode::kExhausted, "{} lines wait for syslog", lines_.size());
    }
    lines_.push_back(framed(line));
    return {};
  }

  // Lines that cannot be delivered are gone, and the chain shows the gap.
  Result<void> flush() override {
    std::deque<std::string> lines;
    {
      const std::lock_guard lock(mutex_);
      lines = std::exchange(lines_, {});
    }
    Result<void> outcome;
    for (const std::string& line : lines) {
      // One deadline is enough for all of them.
      if (!outcome && outcome.error().code() == ErrorCode::kTimeout) break;
      if (auto sent = send(line); !sent) outcome = std::move(sent);
    }
    return outcome;
  }

 private:
  static constexpr std::chrono::seconds kPatience{2};
  static constexpr std::size_t kMostLines = 4096;

  static std::string framed(const std::string& line) {
    const std::time_t now = std::time(nullptr);
    std::tm local{};
    ::localtime_r(&now, &local);
    std::array<char, 32> time{};
    std::strftime(time.data(), time.size(), "%b %e %H:%M:%S", &local);
    return fmt::format("<{}>{} rekindle[{}]: {}", LOG_AUTHPRIV | LOG_NOTICE, time.data(),
                       ::getpid(), line);
  }
  // Connects again once: after its restart the daemon of syslog has another socket.
  Result<void> send(const std::string& text) {
    if (fd_ && ::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL) >= 0) return {};
    if (fd_ && errno == EAGAIN) {
      return fail(ErrorCode::kTimeout, "syslog at {} takes no line for {} s", path_,
                  kPatience.count());
    }
    fd_.reset();
    TRY_VOID(connect());
    if (::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL) >= 0) return {};
    return fail_errno(errno, "send to syslog at " + path_);
  }

  const std::string path_;
  // At first the owner's, then the flusher's thread's.
  UniqueFd fd_;
  std::mutex mutex_;
  // Guarded by the mutex.
  std::deque<std::string> lines_;
};

constexpr std::string_view kSyslog = "syslog";

}  // namespace

struct AuditLog::Delivery {
  explicit Delivery(std::unique_ptr<Sink> to)
      : sink(std::move(to)), flusher([this] { return sink->flush(); }) {}
  const std::unique_ptr<Sink> sink;
  Flusher flusher;
};

AuditLog::AuditLog(std::string target) : target_(std::move(target)), hash_(kNoLine) {}

AuditLog::~AuditLog() = default;

Result<std::unique_ptr<AuditLog>> AuditLog::open(const std::string& target) {
  std::unique_ptr<AuditLog> log(new AuditLog(target));
  std::unique_ptr<Sink> sink;
  if (target == kSyslog || target.starts_with(fmt::format("{}:", kSyslog))) {
    auto syslog = std::make_unique<SyslogSink>(
        target == kSyslog ? std::string(_PATH_LOG) : target.substr(kSyslog.size() + 1));
    TRY_VOID(syslog->connect());
    sink = std::move(syslog);
  } else {
    auto file = std::make_unique<FileSink>(target);
    Chained chained;
    TRY_VOID(file->open(&chained));
    log->next_ = chained.next;
    log->hash_ = chained.hash;
    sink = std::move(file);
  }
  log->delivery_ = std::make_unique<Delivery>(std::move(sink));
  return log;
}

Result<void> AuditLog::reopen() { return delivery_->sink->reopen(); }

void AuditLog::when_on_disk(std::function<void(Result<void>)> then) {
  delivery_->flusher.when_flushed([target = target_, then = std::move(then)](Result<void> done) {
    if (done) return then(done);
    then(fail(ErrorCode::kExhausted,
              "it was done, but its line of the audit log {} may be lost: {}", target,
              done.error().message()));
  });
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
  // Names of peers may be no UTF-8, and must not stop the log.
  const std::string line = json.dump(-1, ' ', false, AuditJson::error_handler_t::replace);
  TRY_VOID(delivery_->sink->append(line));
  delivery_->flusher.appended();
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
  const auto flushed = delivery_->flusher.outcome();
  if (lost_ == 0 && flushed) return {};
  AuditEntry again;
  again.act = "audit_resumed";
  auto done = put(again);
  // The new line makes the flusher try again, for the next call.
  if (done && !flushed) done = flushed;
  if (!done) {
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
    for (std::uint64_t number = 1; next_line(stream, text); ++number) {
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
    if (stream.bad()) {
      return fail(ErrorCode::kInvalid, "the audit log {} cannot be read: name a file",
                  file.string());
    }
  }
  return chain;
}

}  // namespace rekindle::rpc
