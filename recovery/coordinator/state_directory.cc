#include "recovery/coordinator/state_directory.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/state.pb.h"
#include "src/base/digest.h"
#include "src/base/durable_directory.h"
#include "src/base/failpoint.h"
#include "src/base/log.h"
#include "src/base/version.h"
#include "src/base/xxh3.h"

namespace rekindle::coordinator {

namespace {

// Its last character is the number of the format.
constexpr std::string_view kMagic = "RKSTATE2";
// Magic, sequence, body length, and the digest of these.
constexpr std::size_t kHeaderBytes = 8 + 8 + 8 + 8;
// The digest of the body.
constexpr std::size_t kTrailerBytes = 8;
constexpr std::size_t kSectorBytes = 512;
constexpr std::uint64_t kMaxStateBytes = 1u << 30;
// A smaller log is not begun anew for its size.
constexpr std::uint64_t kLeastLogBytes = 1u << 20;
constexpr const char* kStateName = "state";
constexpr const char* kTemporaryName = "state.tmp";
constexpr const char* kLockName = "lock";

void append_u64(std::string& out, std::uint64_t value) {
  for (int shift = 0; shift < 64; shift += 8) out += static_cast<char>(value >> shift & 0xff);
}

std::uint64_t read_u64(std::string_view bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 8; i-- > 0;) value = value << 8 | static_cast<std::uint8_t>(bytes[i]);
  return value;
}

Result<void> write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return fail_errno(errno, "write");
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

Result<std::string> read_all(int fd) {
  std::string text;
  std::array<char, 65536> chunk;
  for (;;) {
    const ssize_t got = ::read(fd, chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(errno, "read");
    if (got == 0) return text;
    text.append(chunk.data(), static_cast<std::size_t>(got));
    if (text.size() > kMaxStateBytes) return fail(ErrorCode::kCorrupt, "larger than 1 GiB");
  }
}

Failure corrupt(std::string_view why) { return fail(ErrorCode::kCorrupt, "{}", why); }

Result<UniqueFd> take_lock(int directory, const std::filesystem::path& path) {
  UniqueFd lock(::openat(directory, kLockName, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!lock) return fail_errno(errno, fmt::format("open {}/{}", path.string(), kLockName));
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return fail_errno(errno, fmt::format("lock {}", path.string()));
    std::array<char, 128> holder{};
    const ssize_t got = ::pread(lock.get(), holder.data(), holder.size() - 1, 0);
    return fail(ErrorCode::kUnavailable,
                "state directory {} is in use by another coordinator ({}); stop that one, or use "
                "another --state directory",
                path.string(), got > 0 ? holder.data() : "unknown");
  }
  std::array<char, 65> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  const std::string name = fmt::format("pid {} on {}", ::getpid(), host.data());
  if (::ftruncate(lock.get(), 0) != 0) return fail_errno(errno, "truncate the lock file");
  TRY_VOID(write_all(lock.get(), name));
  return lock;
}

void apply_batch(const proto::StateBatch& batch, Records& records) {
  for (const auto& entry : batch.entries()) {
    if (entry.erased()) {
      records.erase(entry.key());
    } else {
      records[entry.key()] = entry.value();
    }
  }
}

// kInvalid: another release wrote it.
Result<void> check_format(std::string_view bytes) {
  constexpr std::size_t kDigit = kMagic.size() - 1;
  if (!bytes.starts_with(kMagic.substr(0, kDigit)) || bytes.size() <= kDigit) return {};
  const char format = bytes[kDigit];
  if (format >= '0' && format < kMagic[kDigit]) {
    return fail(ErrorCode::kInvalid,
                "it has the earlier format {}, which this release ({}) does not read: start the "
                "release that wrote it, or move the file away to begin anew (agents report what "
                "they hold)",
                format, software_version());
  }
  if (format > kMagic[kDigit] && format <= '9') {
    return fail(ErrorCode::kInvalid,
                "it has the newer format {}, which this release ({}) does not read: start the "
                "release that wrote it, or a newer one; nothing was changed",
                format, software_version());
  }
  return {};
}

bool all_zero(std::string_view bytes) {
  return bytes.find_first_not_of('\0') == std::string_view::npos;
}

// The number of the frame that begins here; nothing: its header is damaged.
std::optional<std::uint64_t> frame_at(std::string_view rest) {
  const bool holds = rest.size() >= kHeaderBytes && rest.starts_with(kMagic) &&
                     read_u64(rest.substr(24)) == xxh3_64(as_bytes(rest.substr(0, 24)), 0);
  return holds ? std::optional(read_u64(rest.substr(8))) : std::nullopt;
}

bool holds_later_frame(std::string_view rest, std::uint64_t sequence) {
  for (auto at = rest.find(kMagic); at != std::string_view::npos; at = rest.find(kMagic, at + 1)) {
    const auto found = frame_at(rest.substr(at));
    if (found && *found > sequence) return true;
  }
  return false;
}

// One sector of the header of the frame at `at` is all zeros.
bool has_unwritten_header(std::string_view rest, std::size_t at) {
  for (std::size_t begin = 0; begin < kHeaderBytes;) {
    const std::size_t in_sector = kSectorBytes - (at + begin) % kSectorBytes;
    if (all_zero(rest.substr(begin, in_sector))) return true;
    begin += in_sector;
  }
  return false;
}

// The power went while this frame was being written: the file ends within it, or sectors of it
// were never written and read as zeros. It is the last frame, as none follows one that is not
// durable.
bool is_torn(std::string_view rest, std::size_t at_byte, std::uint64_t sequence,
             std::uint64_t body_bytes, bool header_holds) {
  if (rest.size() < kHeaderBytes) return true;
  if (!header_holds) {
    const bool unwritten =
        has_unwritten_header(rest, at_byte) || all_zero(rest.substr(rest.size() - kTrailerBytes));
    return unwritten && !holds_later_frame(rest, sequence);
  }
  const std::size_t room = rest.size() - kHeaderBytes;
  if (room < kTrailerBytes || body_bytes > room - kTrailerBytes) return true;
  if (body_bytes != room - kTrailerBytes) return false;
  if (all_zero(rest.substr(rest.size() - kTrailerBytes))) return true;
  for (std::size_t at = 0; at + kSectorBytes <= rest.size(); ++at) {
    if (rest[at] != 0) continue;
    const std::size_t next = rest.find_first_not_of('\0', at);
    if (next == std::string_view::npos || next - at >= kSectorBytes) return true;
    at = next;
  }
  return false;
}

}  // namespace

std::string encode_frame(std::uint64_t sequence, const std::vector<RecordWrite>& writes) {
  proto::StateBatch batch;
  for (const RecordWrite& write : writes) {
    auto& entry = *batch.add_entries();
    entry.set_key(write.key);
    if (write.value) {
      entry.set_value(*write.value);
    } else {
      entry.set_erased(true);
    }
  }
  const std::string body = batch.SerializeAsString();
  std::string frame(kMagic);
  append_u64(frame, sequence);
  append_u64(frame, body.size());
  append_u64(frame, xxh3_64(as_bytes(frame), 0));
  frame += body;
  append_u64(frame, xxh3_64(as_bytes(body), sequence));
  return frame;
}

Result<Records> decode_log(std::string_view bytes, std::optional<std::size_t>* torn_at) {
  TRY_VOID(check_format(bytes));
  Records records;
  std::size_t at = 0;
  for (std::uint64_t sequence = 1; sequence == 1 || at < bytes.size(); ++sequence) {
    const std::string_view rest = bytes.substr(at);
    bool holds = frame_at(rest) == sequence;
    const std::uint64_t body_bytes = holds ? read_u64(rest.substr(16)) : 0;
    const bool header_holds = holds;
    holds = holds && rest.size() - kHeaderBytes >= kTrailerBytes &&
            body_bytes <= rest.size() - kHeaderBytes - kTrailerBytes;
    proto::StateBatch batch;
    if (holds) {
      const std::string_view body = rest.substr(kHeaderBytes, body_bytes);
      holds =
          read_u64(rest.substr(kHeaderBytes + body_bytes)) == xxh3_64(as_bytes(body), sequence) &&
          batch.ParseFromArray(body.data(), static_cast<int>(body.size()));
    }
    if (!holds) {
      // The first frame was durable before it was renamed into its place.
      if (sequence == 1 || !is_torn(rest, at, sequence, body_bytes, header_holds)) {
        return corrupt(
            fmt::format("frame {} at byte {} does not match its checksum", sequence, at));
      }
      if (torn_at != nullptr) *torn_at = at;
      return records;
    }
    apply_batch(batch, records);
    at += kHeaderBytes + body_bytes + kTrailerBytes;
  }
  return records;
}

Result<StateDirectory> StateDirectory::open(const std::filesystem::path& path) {
  if (path.empty()) {
    return fail(ErrorCode::kInvalid, "the coordinator needs a state directory (--state DIR)");
  }
  TRY_VOID(make_directory_durably(path));
  UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory) return fail_errno(errno, fmt::format("open {}", path.string()));
  TRY(UniqueFd lock, take_lock(directory.get(), path));
  return StateDirectory(path, std::move(directory), std::move(lock));
}

Result<Records> StateDirectory::load() {
  const UniqueFd file(::openat(directory_.get(), kStateName, O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  const std::string name = (path_ / kStateName).string();
  if (!file) {
    if (errno == ENOENT) return Records{};
    return fail_errno(errno, fmt::format("open {}", name));
  }
  auto bytes = read_all(file.get());
  if (!bytes) return fail(std::move(bytes).error().with_context(name));
  std::optional<std::size_t> torn_at;
  auto records = decode_log(*bytes, &torn_at);
  if (!records && records.error().code() == ErrorCode::kInvalid) {
    return fail(std::move(records).error().with_context(name));
  }
  if (!records) {
    return fail(records.error().code(),
                "the coordinator's state file {} is damaged: {}; restore it, or move it away to "
                "begin anew (agents report what they hold)",
                name, records.error().message());
  }
  if (torn_at) {
    log::warn("coordinator.state_torn", "file", name, "at", *torn_at, "bytes", bytes->size());
  }
  records_ = *records;
  return records;
}

Result<void> StateDirectory::write(const std::vector<RecordWrite>& writes) {
  const std::string context = fmt::format("save {}", (path_ / kStateName).string());
  const bool grown = log_bytes_ > std::max(kLeastLogBytes, 3 * snapshot_bytes_);
  Result<void> written;
  if (!log_ || grown) {
    Records next = records_;
    apply_writes(writes, next);
    written = begin_log(next);
  } else {
    written = append(encode_frame(next_sequence_, writes));
  }
  if (!written) {
    // The end of the log is unknown now.
    log_.reset();
    return fail(std::move(written).error().with_context(context));
  }
  apply_writes(writes, records_);
  return {};
}

Result<void> StateDirectory::append(const std::string& frame) {
  // Written in two parts, so that a test can die in between.
  const std::string_view text = frame;
  TRY_VOID(write_all(log_.get(), text.substr(0, text.size() / 2)));
  TRY_VOID(failpoint("coordinator.state.half_written"));
  TRY_VOID(write_all(log_.get(), text.substr(text.size() / 2)));
  TRY_VOID(failpoint("coordinator.state.before_sync"));
  if (::fdatasync(log_.get()) != 0) return fail_errno(errno, "fdatasync");
  TRY_VOID(failpoint("coordinator.state.saved"));
  ++next_sequence_;
  log_bytes_ += frame.size();
  return {};
}

Result<void> StateDirectory::begin_log(const Records& records) {
  std::vector<RecordWrite> all;
  all.reserve(records.size());
  for (const auto& [key, value] : records) all.push_back({key, value});
  const std::string frame = encode_frame(1, all);
  UniqueFd file(::openat(directory_.get(), kTemporaryName,
                         O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) return fail_errno(errno, kTemporaryName);
  const std::string_view text = frame;
  TRY_VOID(write_all(file.get(), text.substr(0, text.size() / 2)));
  TRY_VOID(failpoint("coordinator.state.half_written"));
  TRY_VOID(write_all(file.get(), text.substr(text.size() / 2)));
  TRY_VOID(failpoint("coordinator.state.before_sync"));
  if (::fsync(file.get()) != 0) return fail_errno(errno, "fsync");
  TRY_VOID(failpoint("coordinator.state.before_rename"));
  if (::renameat(directory_.get(), kTemporaryName, directory_.get(), kStateName) != 0) {
    return fail_errno(errno, "rename");
  }
  TRY_VOID(failpoint("coordinator.state.before_directory_sync"));
  if (::fsync(directory_.get()) != 0) return fail_errno(errno, "fsync the directory");
  TRY_VOID(failpoint("coordinator.state.saved"));
  log_ = std::move(file);
  next_sequence_ = 2;
  log_bytes_ = snapshot_bytes_ = frame.size();
  return {};
}

}  // namespace rekindle::coordinator
