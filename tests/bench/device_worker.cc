// A worker for device_bench, told what to do by lines on stdin; answers each with a line of JSON.
//   limit   plain uploads of as many bytes as the model has, from pinned memory: {"seconds":…}
//   share N the same of an N-th of it
//   load    attach and rk_load_into: {"seconds":…,"attach_seconds":…,"path":"ipc"}
//   join    load, as a member of the group, and stays attached
//   update  waits for an update, then moves to its version: {"seconds":…,"version":2,…}
//   check   compares every byte on the device with the model's pattern: {"wrong":0}
// Its environment: REKINDLE_STORE, REKINDLE_MODEL, REKINDLE_DEVICE ("cuda:0", "double:0") and, of a
// group's members, REKINDLE_GROUP, REKINDLE_INSTANCE.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <sys/mman.h>

#include <fmt/format.h>
#include <rekindle.h>

#include "src/bucket/double_device.h"
#if REKINDLE_WITH_CUDA
#include "src/cuda/device.h"
#include "tests/support/must.h"
#endif

namespace {

using namespace rekindle;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;

[[noreturn]] void give_up(const std::string& why) {
  fmt::print(stderr, "device_worker: {}\n", why);
  std::exit(1);
}
void must(std::int32_t code, const char* what, const rk_error& error) {
  if (code != RK_OK) give_up(fmt::format("{}: {}: {}", what, rk_code_name(code), error.message));
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
TimePoint soon() { return std::chrono::steady_clock::now() + 120s; }

std::unique_ptr<bucket::Device> open_device(const std::string& name) {
  if (bucket::is_double(name)) return bucket::make_double_device(name, 1ull << 40);
#if REKINDLE_WITH_CUDA
  return must(cuda::open_device(must(cuda::Driver::load()), std::atoi(name.c_str() + 5)));
#else
  give_up("built without CUDA");
#endif
}

class Worker {
 public:
  explicit Worker(const std::string& device_name)
      : device_name_(device_name), device_(open_device(device_name)) {
    rk_error error;
    rk_connect_options where{};
    where.size = sizeof where;
    where.store = std::getenv("REKINDLE_STORE");
    must(rk_connect(&where, &agent_, &error), "connect", error);
  }

  void load() { rk_detach(load_from(std::getenv("REKINDLE_MODEL"), false)); }

  void join() { member_ = load_from(std::getenv("REKINDLE_MODEL"), true); }

  void update() {
    rk_error error;
    std::uint64_t version = 0;
    must(rk_wait_update(member_, 60'000, &version, &error), "wait for an update", error);
    rk_detach(member_);
    member_ = load_from(fmt::format("m@{}", version), true);
  }

  rk_session* load_from(const std::string& model, bool in_group) {
    const double begin = now();
    rk_session* const session = attach(model, in_group);
    const double attached = now();
    if (targets_.empty()) make_targets(session);
    const double from = now();
    rk_error error;
    must(rk_load_into(session, targets_.data(), targets_.size(), 60'000, &error), "load", error);
    const double end = now();
    must(rk_loaded(session, &error), "loaded", error);
    must(rk_wait_commit(session, 60'000, &error), "commit", error);
    rk_session_info info{};
    info.size = sizeof info;
    must(rk_info(session, &info, &error), "info", error);
    // Without the time that making the targets took, the first time.
    fmt::print("{{\"seconds\":{:.6f},\"attach_seconds\":{:.6f},\"bytes\":{},\"path\":\"{}\"}}\n",
               attached - begin + end - from, attached - begin, bytes_, info.device_path);
    return session;
  }

  void limit(std::uint64_t parts = 1) {
    if (targets_.empty()) give_up("load first: the limit is of as many bytes");
    constexpr std::uint64_t kHost = 2ull << 30;
    if (host_ == nullptr) {
      host_ = static_cast<std::byte*>(::mmap(nullptr, kHost, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
      pin_ = must(device_->pin({host_, kHost}));
      stream_ = must(device_->make_stream());
    }
    const double begin = now();
    const std::uint64_t total = bytes_ / parts;
    for (std::uint64_t done = 0; done < total; done += kHost) {
      const bucket::Upload piece{host_, memory_->address() + done, std::min(kHost, total - done)};
      must(stream_->upload({&piece, 1}));
    }
    must(stream_->finish(soon()));
    fmt::print("{{\"seconds\":{:.6f}}}\n", now() - begin);
  }

  // Word j of tensor i is i << 40 | j.
  void check() {
    const auto stream = must(device_->make_stream());
    std::uint64_t wrong = 0;
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      std::vector<std::uint64_t> words(targets_[i].bytes / 8);
      const bucket::Download copy{reinterpret_cast<std::uint64_t>(targets_[i].data),
                                  reinterpret_cast<std::byte*>(words.data()), words.size() * 8};
      must(stream->download({&copy, 1}));
      must(stream->finish(soon()));
      const std::uint64_t number = std::strtoull(targets_[i].tensor + 6, nullptr, 10);
      for (std::uint64_t j = 0; j < words.size(); ++j) wrong += words[j] != (number << 40 | j);
    }
    fmt::print("{{\"wrong\":{}}}\n", wrong);
  }

 private:
  rk_session* attach(const std::string& model, bool in_group) {
    rk_attach_options options{};
    options.size = sizeof options;
    options.model = model.c_str();
    if (in_group) {
      options.group = std::getenv("REKINDLE_GROUP");
      options.instance = std::getenv("REKINDLE_INSTANCE");
      options.generation = generation_++;
    }
    options.device = device_name_.c_str();
    options.timeout_ms = 60'000;
    rk_session* session = nullptr;
    rk_error error;
    must(rk_attach(agent_, &options, &session, &error), "attach", error);
    return session;
  }

  void make_targets(rk_session* session) {
    const rk_tensor* tensors = nullptr;
    std::size_t count = 0;
    rk_error error;
    must(rk_tensors(session, &tensors, &count, &error), "tensors", error);
    names_.reserve(count);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < count; ++i) total += (tensors[i].bytes + 255) / 256 * 256;
    memory_ = must(device_->allocate(total));
    std::uint64_t at = memory_->address();
    for (std::size_t i = 0; i < count; ++i) {
      names_.emplace_back(tensors[i].name);
      rk_target target{};
      target.tensor = names_.back().c_str();
      target.data = reinterpret_cast<void*>(at);
      target.bytes = tensors[i].bytes;
      targets_.push_back(target);
      bytes_ += tensors[i].bytes;
      at += (tensors[i].bytes + 255) / 256 * 256;
    }
  }

  const std::string device_name_;
  const std::unique_ptr<bucket::Device> device_;
  rk_agent* agent_ = nullptr;
  rk_session* member_ = nullptr;
  std::uint64_t generation_ = 0;
  std::unique_ptr<bucket::Memory> memory_;
  std::vector<std::string> names_;
  std::vector<rk_target> targets_;
  std::uint64_t bytes_ = 0;
  std::byte* host_ = nullptr;
  std::unique_ptr<bucket::Pin> pin_;
  std::unique_ptr<bucket::Stream> stream_;
};

}  // namespace

int main() {
  const char* const device = std::getenv("REKINDLE_DEVICE");
  Worker worker(device != nullptr ? device : "cuda:0");
  fmt::print("{{\"up\":true}}\n");
  std::fflush(stdout);
  for (std::string word; std::cin >> word; std::fflush(stdout)) {
    if (word == "limit") worker.limit();
    if (word == "share") {
      std::uint64_t parts = 1;
      std::cin >> parts;
      worker.limit(parts);
    }
    if (word == "join") worker.join();
    if (word == "update") worker.update();
    if (word == "load") worker.load();
    if (word == "check") worker.check();
  }
  return 0;
}
