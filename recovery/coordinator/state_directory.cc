#include "recovery/coordinator/state_directory.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/state.pb.h"
#include "recovery/rpc/convert.h"
#include "src/base/digest.h"
#include "src/base/failpoint.h"

namespace rekindle::coordinator {

namespace {

constexpr std::string_view kMagic = "RKSTATE1";
constexpr std::size_t kHeaderBytes = 8 + 8 + 16;  // magic, body length, digest
constexpr std::uint64_t kMaxStateBytes = 1u << 30;
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

}  // namespace

std::string encode_state(const DurableState& state) {
  proto::CoordinatorState message;
  message.set_epoch(state.epoch);
  for (const auto& [id, version] : state.versions) {
    auto& entry = *message.add_versions();
    *entry.mutable_id() = rpc::to_proto(id);
    *entry.mutable_root() = rpc::to_proto(version.root);
    *entry.mutable_tensor_set() = rpc::to_proto(version.tensor_set);
    entry.set_checkpoint_bytes(version.checkpoint_bytes);
    entry.set_retiring(version.retiring);
    if (version.replicas) entry.set_replicas(*version.replicas);
  }
  for (const std::string& node_id : state.drained) message.add_drained(node_id);
  const std::string body = message.SerializeAsString();
  const Digest128 digest = xxh3_128(as_bytes(body));
  std::string bytes(kMagic);
  append_u64(bytes, body.size());
  append_u64(bytes, digest.low);
  append_u64(bytes, digest.high);
  return bytes + body;
}

Result<DurableState> decode_state(std::string_view bytes) {
  if (bytes.size() < kHeaderBytes) return corrupt("it is shorter than its header");
  if (!bytes.starts_with(kMagic)) return corrupt("it does not begin as a state file of version 1");
  const std::string_view body = bytes.substr(kHeaderBytes);
  if (read_u64(bytes.substr(8)) != body.size()) return corrupt("its length is not what it says");
  const Digest128 digest{read_u64(bytes.substr(16)), read_u64(bytes.substr(24))};
  if (digest != xxh3_128(as_bytes(body))) return corrupt("its checksum does not match");
  proto::CoordinatorState message;
  if (!message.ParseFromArray(body.data(), static_cast<int>(body.size()))) {
    return corrupt("its protobuf is malformed");
  }
  DurableState state;
  state.epoch = message.epoch();
  for (const auto& entry : message.versions()) {
    TRY(ModelVersion id, rpc::from_proto(entry.id()));
    state.versions[std::move(id)] = {
        rpc::from_proto(entry.root()), rpc::from_proto(entry.tensor_set()),
        entry.checkpoint_bytes(), entry.retiring(),
        entry.has_replicas() ? std::optional(entry.replicas()) : std::nullopt};
  }
  state.drained.insert(message.drained().begin(), message.drained().end());
  return state;
}

Result<StateDirectory> StateDirectory::open(const std::filesystem::path& path) {
  if (path.empty()) {
    return fail(ErrorCode::kInvalid, "the coordinator needs a state directory (--state DIR)");
  }
  std::error_code error;
  const bool created = std::filesystem::create_directories(path, error);
  if (error) return fail_errno(error.value(), fmt::format("create {}", path.string()));
  if (created && ::chmod(path.c_str(), 0700) != 0) {
    return fail_errno(errno, fmt::format("chmod {}", path.string()));
  }
  UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory) return fail_errno(errno, fmt::format("open {}", path.string()));
  TRY(UniqueFd lock, take_lock(directory.get(), path));
  return StateDirectory(path, std::move(directory), std::move(lock));
}

Result<DurableState> StateDirectory::load() {
  const UniqueFd file(::openat(directory_.get(), kStateName, O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  const std::string name = (path_ / kStateName).string();
  if (!file) {
    if (errno == ENOENT) return DurableState{};
    return fail_errno(errno, fmt::format("open {}", name));
  }
  auto bytes = read_all(file.get());
  if (!bytes) return fail(std::move(bytes).error().with_context(name));
  auto state = decode_state(*bytes);
  if (!state) {
    return fail(ErrorCode::kCorrupt,
                "the coordinator's state file {} is damaged: {}; restore it, or move it away to "
                "begin anew (agents report what they hold)",
                name, state.error().message());
  }
  return state;
}

Result<void> StateDirectory::save(const DurableState& state) {
  const std::string context = fmt::format("save {}", (path_ / kStateName).string());
  const auto failed = [&](Error error) { return fail(std::move(error).with_context(context)); };
  const std::string bytes = encode_state(state);
  UniqueFd file(::openat(directory_.get(), kTemporaryName,
                         O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) return failed(errno_error(errno, kTemporaryName));
  // Written in two parts, so that a test can die between them.
  const std::string_view text = bytes;
  if (auto r = write_all(file.get(), text.substr(0, text.size() / 2)); !r) return failed(r.error());
  if (auto r = failpoint("coordinator.state.half_written"); !r) return failed(r.error());
  if (auto r = write_all(file.get(), text.substr(text.size() / 2)); !r) return failed(r.error());
  if (auto r = failpoint("coordinator.state.before_sync"); !r) return failed(r.error());
  if (::fsync(file.get()) != 0) return failed(errno_error(errno, "fsync"));
  if (auto r = failpoint("coordinator.state.before_rename"); !r) return failed(r.error());
  if (::renameat(directory_.get(), kTemporaryName, directory_.get(), kStateName) != 0) {
    return failed(errno_error(errno, "rename"));
  }
  if (auto r = failpoint("coordinator.state.before_directory_sync"); !r) return failed(r.error());
  if (::fsync(directory_.get()) != 0) return failed(errno_error(errno, "fsync the directory"));
  if (auto r = failpoint("coordinator.state.saved"); !r) return failed(r.error());
  return {};
}

}  // namespace rekindle::coordinator
