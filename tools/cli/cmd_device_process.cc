#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include <fcntl.h>
#include <sys/prctl.h>

#include <CLI/CLI.hpp>

#include "recovery/device/device_child.h"
#include "recovery/device/process/device_process.h"
#include "src/base/log.h"
#include "tools/cli/exit_code.h"
#include "tools/cli/session.h"

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
  // It ends with its agent, which signals to the whole group may reach first; hanging or not.
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

void add_device_process(CLI::App& app, Session& session) {
  CLI::App* sub = app.add_subcommand(
      "device-process", "Fill buckets on this host's GPUs. For agents, which start it.");
  sub->group("");  // not in the list of commands
  auto args = std::make_shared<DeviceProcessArgs>();
  sub->add_option("--fd", args->fd, "Descriptor of the socket to the agent")->required();
  sub->add_option("--double", args->doubles, "GPUs made of host memory, for tests")
      ->type_name("N:BYTES");
  sub->add_option("--release-ms", args->release_ms, "Of a bucket, by a worker that lives");
  sub->add_option("--keep-rate", args->keep_rate,
                  "Bytes a second of a broadcast that each device copies to its host");
  sub->callback([&session, args] {
    session.choose("device-process", [args] { return run_device_process_command(*args); });
  });
}

}  // namespace rekindle::cli
