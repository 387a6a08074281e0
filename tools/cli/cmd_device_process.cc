#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include <fcntl.h>
#include <sys/prctl.h>

#include "recovery/device/device_child.h"
#include "recovery/device/process/device_process.h"
#include "src/base/log.h"
#include "tools/cli/command_line.h"
#include "tools/cli/exit_code.h"

namespace rekindle::cli {
namespace {

struct DeviceProcessArgs {
  int fd = -1;
  std::string doubles;
  std::int64_t release_ms = 0;
  std::uint64_t keep_rate = device::SessionTimes{}.keep_bytes_per_second;
};

Result<int> run_device_process_command(const DeviceProcessArgs& args) {
  device::DeviceProcessOptions options;
  if (!args.doubles.empty()) {
    TRY(options.doubles, device::parse_doubles(args.doubles));
  }
  if (args.release_ms > 0) options.times.release = std::chrono::milliseconds(args.release_ms);
  options.times.keep_bytes_per_second = args.keep_rate;
  if (::fcntl(args.fd, F_SETFD, FD_CLOEXEC) != 0) {
    return fail(ErrorCode::kInvalid,
                "--fd {}: this command is started by an agent, which gives it a socket", args.fd);
  }
  // It ends with its agent, even if it hangs. A signal to the whole process group may reach it
  // first.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  std::signal(SIGHUP, SIG_IGN);
  (void)::prctl(PR_SET_PDEATHSIG, SIGKILL);
  (void)::prctl(PR_SET_NAME, "rekindle-device");
  const auto ran = device::run_device_process(UniqueFd(args.fd), options);
  if (ran) return kExitOk;
  log::error("device.lost", "why", ran.error());
  std::fflush(nullptr);
  std::_Exit(device::kDeviceLostExit);
}

}  // namespace

void add_device_process(Command& app, Session& session) {
  Command sub = app.command("device-process",
                            "Fill buckets on this host's GPUs. For agents, which start it.");
  sub.hide();
  auto args = std::make_shared<DeviceProcessArgs>();
  sub.option("--fd", args->fd, "Descriptor of the socket to the agent").required();
  sub.option("--double", args->doubles, "GPUs made of host memory, for tests").type_name("N:BYTES");
  sub.option("--release-ms", args->release_ms, "Time for a live worker to release a bucket");
  sub.option("--keep-rate", args->keep_rate,
             "Bytes of a broadcast that each device copies to its host in a second");
  sub.runs(session, "device-process", [args] { return run_device_process_command(*args); });
}

}  // namespace rekindle::cli
