#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "recovery/rpc/credentials.h"
#include "tools/cli/rdma_view.h"
#include "transport/verbs/host/gpu_direct.h"

namespace rekindle::cli::doctor {

enum class Level { kOk, kWarn, kFail };
std::string_view to_string(Level level);

// The result of one check: the findings, their severity, and advice.
struct Check {
  std::string name;
  Level level = Level::kOk;
  std::string found;
  // "" when there is nothing to do.
  std::string advice;
};
using Checks = std::vector<Check>;

// The files of the kernel. Tests use a tree of their own.
struct Kernel {
  std::filesystem::path root = "/";

  std::filesystem::path operator/(std::string_view path) const { return root / path; }
  // The file's text without surrounding white space; nullopt when it cannot be read.
  std::optional<std::string> read(std::string_view path) const;
  std::optional<std::uint64_t> read_number(std::string_view path) const;
  // Names in a directory, sorted; empty when there is none.
  std::vector<std::string> list(std::string_view path) const;
};

// doctor_host.cc
Check check_kernel(const Kernel& kernel);
Check check_cpu();
Check check_memlock(std::uint64_t limit_bytes, bool may_lock_any);
Check check_open_files(std::uint64_t soft, std::uint64_t hard);
Check check_memory(const Kernel& kernel);
// `store`: the directory whose files count.
Check check_huge_pages(const Kernel& kernel, const std::filesystem::path& store);
Check check_store(const std::filesystem::path& directory);
Check check_leases(const std::filesystem::path& directory);
Check check_build();
Checks host_checks(const Kernel& kernel, const std::filesystem::path& store);

Check check_port(const std::string& what, std::uint16_t port);
// Which proof of its identity this host has, and for how long.
Check check_identity(const rpc::CredentialOptions& options);

// doctor_devices.cc
Check check_numa(const Kernel& kernel);
Check check_network(const Kernel& kernel);
Check check_tcp(const Kernel& kernel);
Check check_rdma(const Kernel& kernel, bool compiled_in);
Check check_gpus(const Kernel& kernel, bool compiled_in);
Checks device_checks(const Kernel& kernel);

// The driver, each device and NCCL; nothing in a build without CUDA. `gpus`: the kernel has some.
Checks cuda_checks(bool gpus);

// The ports as the transport sees them.
Check check_rail(const RailView& rail);
Check check_gpu_direct(const RdmaView& view, const transport::verbs::GpuDirectFacts& facts);
transport::verbs::GpuDirectFacts gpu_direct_facts(const Kernel& kernel, const RdmaView& view);
// A line for each port, and how NICs reach GPU memory.
Checks rdma_checks(const Kernel& kernel);

}  // namespace rekindle::cli::doctor
