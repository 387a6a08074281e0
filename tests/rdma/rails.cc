#include "tests/rdma/rails.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <stdexcept>

#include <infiniband/verbs.h>

#include "tests/support/process.h"

namespace rekindle::testing {
namespace {

std::vector<std::string> names_in(const char* variable) {
  std::vector<std::string> names;
  const char* value = std::getenv(variable);
  std::istringstream list(value == nullptr ? "" : value);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
  return names;
}

bool has_active_port(ibv_device* device) {
  ibv_context* context = ibv_open_device(device);
  if (context == nullptr) return false;
  ibv_port_attr port{};
  const bool active = ibv_query_port(context, 1, &port) == 0 && port.state == IBV_PORT_ACTIVE;
  ibv_close_device(context);
  return active;
}

std::string first_active_device() {
  ibv_device** devices = ibv_get_device_list(nullptr);
  std::string name;
  for (ibv_device** device = devices; device != nullptr && *device != nullptr && name.empty();
       ++device)
    if (has_active_port(*device)) name = ibv_get_device_name(*device);
  if (devices != nullptr) ibv_free_device_list(devices);
  return name;
}

void run_lab(std::vector<std::string> argv) {
  const char* lab = std::getenv("REKINDLE_RDMA_LAB");
  if (lab == nullptr) throw std::runtime_error("no cables here: only tests/rdma/run has them");
  argv.insert(argv.begin(), lab);
  const Finished done = run(std::move(argv));
  if (done.exit != Exit{.code = 0}) throw std::runtime_error("lab failed: " + done.err);
}

}  // namespace

Rails rdma_rails() {
  Rails rails{.a = names_in("REKINDLE_RDMA_A"), .b = names_in("REKINDLE_RDMA_B")};
  if (rails.a.size() != rails.b.size())
    throw std::runtime_error(
        "REKINDLE_RDMA_A and REKINDLE_RDMA_B name different numbers of devices");
  if (rails.a.empty()) {
    const std::string name = first_active_device();
    if (!name.empty()) rails = {.a = {name}, .b = {name}};
  }
  return rails;
}

bool rdma_cables_can_fail() { return std::getenv("REKINDLE_RDMA_LAB") != nullptr; }

CableFault::CableFault(std::initializer_list<std::string_view> arguments)
    : cable_(arguments.size() > 1 ? arguments.begin()[1] : std::string_view()) {
  run_lab({arguments.begin(), arguments.end()});
}

CableFault::~CableFault() {
  if (repaired_) return;
  try {
    repair();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cable %s is not repaired: %s\n", cable_.c_str(), error.what());
  }
}

void CableFault::repair() {
  run_lab({"restore", cable_});
  repaired_ = true;
}

}  // namespace rekindle::testing
