#include "src/base/units.h"
#include "tools/cli/doctor.h"
#include "tools/cli/output.h"
#if REKINDLE_WITH_CUDA
#include "src/cuda/device.h"
#endif
#if REKINDLE_WITH_NCCL
#include "src/cuda/nccl.h"
#endif

namespace rekindle::cli::doctor {

#if REKINDLE_WITH_CUDA

namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

Check check_nccl() {
#if REKINDLE_WITH_NCCL
  const auto nccl = cuda::Nccl::load();
  if (!nccl) {
    return {"nccl", Level::kWarn, nccl.error().message(),
            "broadcasts between GPUs need it: install libnccl2; pulls do not"};
  }
  const int version = (*nccl)->version();
  return {"nccl", Level::kOk,
          fmt::format("{}.{}.{}", version / 10000, version % 10000 / 100, version % 100), ""};
#else
  return {"nccl", Level::kOk, "not in this build", ""};
#endif
}

}  // namespace

Checks cuda_checks(bool gpus) {
  const auto driver = cuda::Driver::load();
  if (!driver) {
    if (!gpus) return {{"cuda", Level::kOk, driver.error().message(), ""}};
    return {{"cuda", Level::kWarn, driver.error().message(),
             "there are GPUs, but weights are handed over in host memory: mend the driver"}};
  }
  const auto devices = cuda::list_devices(**driver);
  if (!devices) return {{"cuda", Level::kWarn, devices.error().message(), "see nvidia-smi"}};
  Checks checks;
  for (const auto& device : *devices) {
    Check check{"cuda", Level::kOk,
                fmt::format("{} {}, {}, driver {}", device.id, printable(device.name),
                            format_bytes(device.total_bytes), version_text((*driver)->version())),
                ""};
    if (!device.not_shareable.empty()) {
      check.level = Level::kWarn;
      check.advice = fmt::format("{}: workers upload by themselves, slower", device.not_shareable);
    }
    checks.push_back(std::move(check));
  }
  checks.push_back(check_nccl());
  return checks;
}

#else

Checks cuda_checks(bool) { return {}; }

#endif

}  // namespace rekindle::cli::doctor
