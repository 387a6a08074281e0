// `rekindle device-process` without the command around it; --hang and --exit misbehave, and a round
// can be had with less patience.
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include "recovery/device/process.h"

int main(int argc, char** argv) {
  using namespace rekindle;
  using Milliseconds = std::chrono::milliseconds;
  device::DeviceProcessOptions options;
  options.free_fraction = 1;
  int fd = -1;
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
    if (argument == "--hang-ms") options.times.round_release = Milliseconds(std::atoi(argv[++i]));
  }
  return device::run_device_process(UniqueFd(fd), options) ? 0 : device::kDeviceLostExit;
}
