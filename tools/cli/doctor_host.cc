#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>

#include <linux/capability.h>
#include <linux/magic.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "src/base/blake3.h"
#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "src/store/huge_pages.h"
#include "src/store/read_lease.h"
#include "tools/cli/cli_session.h"
#include "tools/cli/doctor.h"

namespace rekindle::cli::doctor {

std::string_view to_string(Level level) {
  switch (level) {
    case Level::kOk:
      return "ok";
    case Level::kWarn:
      return "warn";
    case Level::kFail:
      return "fail";
  }
  return "?";
}

std::optional<std::string> Kernel::read(std::string_view path) const {
  std::ifstream file(root / path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (file.bad()) return std::nullopt;
  const auto is_space = [](char c) { return c == ' ' || c == '\n' || c == '\t' || c == '\0'; };
  text.erase(std::find_if_not(text.rbegin(), text.rend(), is_space).base(), text.end());
  text.erase(text.begin(), std::ranges::find_if_not(text, is_space));
  return text;
}

std::optional<std::uint64_t> Kernel::read_number(std::string_view path) const {
  const auto text = read(path);
  if (!text) return std::nullopt;
  std::uint64_t value = 0;
  auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (error != std::errc() || end == text->data()) return std::nullopt;
  return value;
}

std::vector<std::string> Kernel::list(std::string_view path) const {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(root / path, error), end; !error && it != end;
       it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  std::ranges::sort(names);
  return names;
}

Check check_kernel(const Kernel& kernel) {
  const std::string release = kernel.read("proc/sys/kernel/osrelease").value_or("unknown");
  int major = 0;
  int minor = 0;
  const char* const last = release.data() + release.size();
  auto [dot, error] = std::from_chars(release.data(), last, major);
  if (error == std::errc() && dot != last) std::from_chars(dot + 1, last, minor);
  Check check{"kernel", Level::kOk, "Linux " + release, ""};
  if (major < 5 || (major == 5 && minor < 10)) {
    check.level = Level::kFail;
    check.advice = "needs Linux 5.10 or newer (pidfd, memfd)";
  }
  return check;
}

Check check_cpu() {
  const std::string simd(blake3_simd_level());
  Check check{"cpu", Level::kOk,
              fmt::format("{} cores, digests use {}", ::sysconf(_SC_NPROCESSORS_ONLN), simd), ""};
  if (simd == "portable") {
    check.level = Level::kWarn;
    check.advice = "digesting is several times slower without AVX2: verification may slow pulls";
  }
  return check;
}

Check check_memlock(std::uint64_t limit_bytes, bool may_lock_any) {
  Check check{"memlock", Level::kOk, "", ""};
  if (limit_bytes == RLIM_INFINITY) {
    check.found = "unlimited";
  } else if (may_lock_any) {
    check.found = fmt::format("{}, but this user may lock any amount", format_bytes(limit_bytes));
  } else {
    check.level = Level::kWarn;
    check.found = format_bytes(limit_bytes);
    check.advice =
        "pinning weights for RDMA or CUDA fails beyond it; set LimitMEMLOCK=infinity in the unit, "
        "or `ulimit -l unlimited`";
  }
  return check;
}

Check check_open_files(std::uint64_t soft, std::uint64_t hard) {
  constexpr std::uint64_t kEnough = 4096;
  Check check{"open files", Level::kOk, fmt::format("{} (at most {})", soft, hard), ""};
  if (soft < kEnough) {
    check.level = Level::kWarn;
    check.advice = fmt::format(
        "a busy agent or coordinator holds thousands of connections; raise it to {} or more "
        "(`ulimit -n`, LimitNOFILE=)",
        kEnough);
  }
  return check;
}

namespace {

// A field of /proc/meminfo in bytes.
std::uint64_t meminfo(const Kernel& kernel, std::string_view field) {
  const std::string text = kernel.read("proc/meminfo").value_or("");
  const auto at = text.find(fmt::format("{}:", field));
  if (at == std::string::npos) return 0;
  const char* begin = text.data() + at + field.size() + 1;
  const char* const last = text.data() + text.size();
  begin = std::find_if(begin, last, [](char c) { return c != ' '; });
  std::uint64_t value = 0;
  std::from_chars(begin, last, value);
  return field.starts_with("HugePages_") ? value : value * kKiB;
}

bool may_lock_any() {
  struct {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    std::array<__user_cap_data_struct, 2> data{};
  } caps;
  if (::syscall(SYS_capget, &caps.header, caps.data.data()) != 0) return false;
  return (caps.data[0].effective >> CAP_IPC_LOCK & 1U) != 0;
}

}  // namespace

Check check_memory(const Kernel& kernel) {
  const std::uint64_t total = meminfo(kernel, "MemTotal");
  const std::uint64_t swap = meminfo(kernel, "SwapTotal");
  Check check{"memory", Level::kOk,
              fmt::format("{}, {} available", format_bytes(total),
                          format_bytes(meminfo(kernel, "MemAvailable"))),
              ""};
  // nullopt for "max".
  const auto limit = kernel.read_number("sys/fs/cgroup/memory.max");
  if (limit && *limit < total) {
    check.level = Level::kWarn;
    check.found += fmt::format(", this container may use {}", format_bytes(*limit));
    check.advice =
        "the store counts against the container's memory: mount the host's /dev/shm and "
        "give --budget";
  } else if (swap > 0) {
    check.level = Level::kWarn;
    check.found += fmt::format(", {} of swap", format_bytes(swap));
    check.advice =
        "weights on tmpfs can be swapped out; turn swap off on inference hosts (swapoff -a)";
  }
  return check;
}

Check check_huge_pages(const Kernel& kernel, const std::filesystem::path& store) {
  const std::string reserved =
      fmt::format("{} hugetlb pages reserved", meminfo(kernel, "HugePages_Total"));
  const auto mount = store::find_tmpfs(kernel.read("proc/self/mountinfo").value_or(""),
                                       std::filesystem::absolute(store).lexically_normal());
  if (!mount) {
    return {"huge pages", Level::kOk, fmt::format("the store is not on a tmpfs; {}", reserved), ""};
  }
  const store::HugeBytes bytes = store::count_huge_bytes(store);
  Check check{
      "huge pages", Level::kOk,
      fmt::format("tmpfs {}: huge={}; {} of {} in the store are huge; {}", mount->at.string(),
                  mount->huge, format_bytes(bytes.huge), format_bytes(bytes.all), reserved),
      ""};
  if (!mount->gives_huge_pages()) {
    check.level = Level::kWarn;
    check.advice = fmt::format(
        "faulting in and pinning 4 KiB pages takes minutes per TB: `mount -o "
        "remount,huge=within_size {}` helps new copies; an agent of root with --huge-pages mounts "
        "its own",
        mount->at.string());
  } else if (bytes.huge < bytes.all / 2) {
    check.level = Level::kWarn;
    check.advice =
        "these copies are older than the mount's option, or memory was too fragmented for huge "
        "pages; pull or publish them again";
  }
  return check;
}

namespace {

// The longest prefix of the path that exists.
std::filesystem::path existing_part(const std::filesystem::path& directory) {
  std::filesystem::path existing = std::filesystem::absolute(directory);
  std::error_code ignored;
  while (!std::filesystem::exists(existing, ignored) && existing.has_relative_path()) {
    existing = existing.parent_path();
  }
  return existing;
}

}  // namespace

Check check_store(const std::filesystem::path& directory) {
  Check check{"store", Level::kOk, "", ""};
  const std::filesystem::path existing = existing_part(directory);
  struct statfs fs {};
  if (::statfs(existing.c_str(), &fs) != 0) {
    return {"store", Level::kFail, fmt::format("{} cannot be looked at", directory.string()),
            "name another directory with --store"};
  }
  const auto block = static_cast<std::uint64_t>(fs.f_bsize);
  const std::uint64_t total = fs.f_blocks * block;
  const std::uint64_t free = fs.f_bavail * block;
  const bool in_memory = fs.f_type == TMPFS_MAGIC || fs.f_type == HUGETLBFS_MAGIC;
  check.found = fmt::format("{}: {} on {}, {} free", directory.string(), format_bytes(total),
                            in_memory ? "tmpfs" : "a disk", format_bytes(free));
  if (::access(existing.c_str(), W_OK | X_OK) != 0) {
    check.level = Level::kFail;
    check.advice = fmt::format("{} is not writable for this user", existing.string());
  } else if (total == 0) {
    check.level = Level::kFail;
    check.advice = "no files can be kept there; name another directory with --store";
  } else if (!in_memory) {
    check.level = Level::kWarn;
    check.advice = "works, but weights on a disk are not in memory; use a tmpfs such as /dev/shm";
  } else if (free < total / 10) {
    check.level = Level::kWarn;
    check.advice =
        "less than a tenth is free: retire versions, or enlarge it: mount -o "
        "remount,size=… the file system";
  }
  return check;
}

Check check_leases(const std::filesystem::path& directory) {
  if (auto can = store::check_read_leases(existing_part(directory)); !can) {
    return {
        "leases", Level::kWarn,
        fmt::format("no read lease on files in {}: {}", directory.string(), can.error().message()),
        "a process of the agent's user that maps a copy's file for writing is not noticed "
        "before a scrub; use a tmpfs, ext4, XFS or Btrfs, and sysctl fs.leases-enable=1"};
  }
  return {"leases", Level::kOk, "whoever opens a copy's file for writing is noticed", ""};
}

Check check_build() {
  const BuildInfo info = build_info();
  const auto on = [](bool value) { return value ? "yes" : "no"; };
  return {"build", Level::kOk,
          fmt::format("{} ({}, {}); verbs {}, CUDA {}, NCCL {}", info.version, info.build_type,
                      info.compiler, on(info.verbs), on(info.cuda), on(info.nccl)),
          ""};
}

Checks host_checks(const Kernel& kernel, const std::filesystem::path& store) {
  rlimit memlock{};
  ::getrlimit(RLIMIT_MEMLOCK, &memlock);
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  return {check_build(),
          check_kernel(kernel),
          check_cpu(),
          check_memory(kernel),
          check_store(store),
          check_leases(store),
          check_huge_pages(kernel, store),
          check_memlock(memlock.rlim_cur, may_lock_any()),
          check_open_files(files.rlim_cur, files.rlim_max)};
}

Check check_port(const std::string& what, std::uint16_t port) {
  Check check{fmt::format("port {}", port), Level::kOk, "free for " + what, ""};
  const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
    check.level = Level::kWarn;
    check.found = fmt::format("not free for {}: {}", what, std::strerror(errno));
    check.advice = fmt::format(
        "fine when {} runs here already (see `ss -ltnp sport = :{}`); else give --listen", what,
        port);
  }
  return check;
}

Check check_identity(const rpc::CredentialOptions& options) {
  Check check{"identity", Level::kOk, "", ""};
  const auto opened = rpc::Credentials::open(options);
  if (!opened) {
    return {"identity", Level::kFail, opened.error().message(),
            "see `--secret-file` and `--tls-cert`"};
  }
  if (*opened == nullptr) {
    return {"identity", Level::kWarn,
            "no secret and no certificate: daemons listen on loopback only",
            "make a secret for all hosts: openssl rand -hex 32 > FILE; chmod 600 FILE; then "
            "--secret-file FILE"};
  }
  const auto context = (*opened)->context();
  std::vector<std::string> found;
  if (context->has_certificate) {
    constexpr std::int64_t kDay = 86400;
    const std::int64_t left =
        context->not_after_s - std::chrono::duration_cast<std::chrono::seconds>(
                                   std::chrono::system_clock::now().time_since_epoch())
                                   .count();
    const std::int64_t life = context->not_after_s - context->not_before_s;
    const std::string who = context->principals.empty() ? "nobody" : context->principals.front();
    found.push_back(left < 0
                        ? fmt::format("the certificate of {} has expired", who)
                        : fmt::format("the certificate of {}, for {} more days", who, left / kDay));
    if (left < 0) {
      check.level = Level::kFail;
    } else if (left < std::min(14 * kDay, life / 3)) {
      check.level = Level::kWarn;
    }
    if (check.level != Level::kOk) {
      check.advice = "renew it, and replace the files: daemons read them again by themselves";
    }
  }
  for (const rpc::SharedKey& key : context->shared_keys) found.push_back("secret " + key.id);
  check.found = fmt::format("{}", fmt::join(found, ", "));
  return check;
}

}  // namespace rekindle::cli::doctor
