// `rekindle device-process` without the command around it. --hang and --exit misbehave. With
// --stuck-aborts, aborts do not return; with --deaf-aborts, they end nothing; with --stay, the
// process does not end when a device is lost. The deadlines of a round can be shortened.
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "recovery/device/device_child.h"
#include "recovery/device/process/device_process.h"
#include "src/base/failpoint.h"
#include "tests/device/faulty_collectives.h"

int main(int argc, char** argv) {
  using namespace rekindle;
  using Milliseconds = std::chrono::milliseconds;
  device::DeviceProcessOptions options;
  options.free_fraction = 1;
  int fd = -1;
  bool stays = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--exit") return 3;
    if (argument == "--hang") std::this_thread::sleep_for(std::chrono::hours(1));
    if (argument == "--fd") fd = std::atoi(argv[++i]);
    if (argument == "--double") options.doubles = *device::parse_doubles(argv[++i]);
    if (argument == "--keep-rate") {
      options.times.keep_bytes_per_second = std::strtoull(argv[++i], nullptr, 10);
    }
    if (argument == "--meet-ms") options.times.meet = Milliseconds(std::atoi(argv[++i]));
    if (argument == "--fill-ms") options.times.round_fill = Milliseconds(std::atoi(argv[++i]));
    if (argument == "--abort-ms") options.times.abort = Milliseconds(std::atoi(argv[++i]));
    if (argument == "--stay") stays = true;
    if (argument == "--failpoints" && !arm_failpoints(argv[++i])) return 2;
    if (argument == "--drain-ms") options.times.drain = Milliseconds(std::atoi(argv[++i]));
    if (argument == "--stuck-aborts" || argument == "--deaf-aborts") {
      const bool stuck = argument == "--stuck-aborts";
      options.collectives = [stuck]() -> Result<std::unique_ptr<bucket::Collectives>> {
        return std::make_unique<device::testing::StuckCollectives>(
            stuck ? std::make_shared<device::testing::Gate>() : nullptr);
      };
    }
    if (argument == "--hang-ms") options.times.round_release = Milliseconds(std::atoi(argv[++i]));
  }
  if (device::run_device_process(UniqueFd(fd), options)) return 0;
  if (stays) std::this_thread::sleep_for(std::chrono::hours(1));
  // Resources that the device does not give back are not awaited.
  std::_Exit(device::kDeviceLostExit);
}
