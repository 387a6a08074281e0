// The time until the successor of a killed worker has its weights again if they stayed in the
// memory of the GPU, beside an upload of as many bytes from pinned memory in the same run.
//
//   resident_bench [GIB [BLOCKS [RUNS]]]      64, 64, 5
//
// A worker fills blocks and is killed (SIGKILL). This process, without CUDA, holds their
// descriptors. A checker, which stays as the device process does, digests the blocks before and
// after. A new process opens them. Prints the medians: the start of CUDA in the new process,
// opening all blocks there, the check, and the upload. Then one bit is changed, and the check has
// to find it.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>

#include <fmt/format.h>

#include "src/base/blake3.h"
#include "src/base/median.h"
#include "src/bucket/block_digests.h"
#include "src/cuda/device.h"
#include "src/cuda/driver.h"
#include "tests/bucket/device_child.h"
#include "tests/support/must.h"

namespace {

using namespace rekindle;                   // NOLINT(google-build-using-namespace)
using namespace rekindle::bucket;           // NOLINT(google-build-using-namespace)
using namespace rekindle::bucket::testing;  // NOLINT(google-build-using-namespace)

constexpr int kParent = 3;
constexpr std::uint64_t kPinned = 1 << 30;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
std::uint64_t microseconds_since(double begun) {
  return static_cast<std::uint64_t>((now() - begun) * 1e6);
}
TimePoint late() { return steady_now() + std::chrono::minutes(5); }

std::unique_ptr<Device> open_gpu() {
  return must(cuda::open_device(must(cuda::Driver::load()), 0));
}

// Pinned host memory with bytes that differ everywhere.
class Source {
 public:
  explicit Source(Device& device)
      : memory_(static_cast<std::byte*>(::mmap(nullptr, kPinned, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0))),
        device_(device) {
    auto* const words = reinterpret_cast<std::uint64_t*>(memory_);
    for (std::uint64_t i = 0; i < kPinned / 8; ++i) words[i] = i * 0x9e3779b97f4a7c15ull;
    pin_ = must(device.pin({memory_, kPinned}));
  }
  void upload(const std::vector<std::unique_ptr<Block>>& blocks) {
    const auto stream = must(device_.make_stream());
    for (const auto& block : blocks) {
      for (std::uint64_t at = 0; at < block->bytes(); at += kPinned) {
        const Upload upload{.from = memory_,
                            .to = block->address() + at,
                            .run_bytes = std::min(kPinned, block->bytes() - at)};
        must(stream->upload({&upload, 1}));
      }
    }
    must(stream->finish(late()));
  }

 private:
  std::byte* const memory_;
  Device& device_;
  std::unique_ptr<Pin> pin_;
};

// The worker: makes and fills the blocks, gives them away and waits to be killed.
int fill() {
  const std::uint64_t count = receive_word(kParent);
  const std::uint64_t bytes = receive_word(kParent);
  const auto device = open_gpu();
  std::vector<std::unique_ptr<Block>> blocks;
  for (std::uint64_t i = 0; i < count; ++i) blocks.push_back(must(device->allocate_block(bytes)));
  Source(*device).upload(blocks);
  for (const auto& block : blocks) {
    send_word(kParent, block->bytes());
    send_handle(kParent, {"block", must(block->export_descriptor())});
  }
  (void)receive_word(kParent);
  return 0;
}

std::vector<BlockFile> receive_blocks(int socket, std::uint64_t count) {
  std::vector<BlockFile> blocks;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t bytes = receive_word(socket);
    blocks.push_back({receive_handle(socket).fd, bytes});
  }
  return blocks;
}
void send_blocks(int socket, const std::vector<BlockFile>& blocks) {
  for (const BlockFile& block : blocks) {
    send_word(socket, block.bytes);
    send_handle(socket, {"block", UniqueFd(::fcntl(block.descriptor.get(), F_DUPFD_CLOEXEC, 0))});
  }
}

// The checker: digests the blocks that come, and says how long it took and the digest of all
// digests.
int check() {
  const auto device = open_gpu();
  send_word(kParent, 1);
  for (;;) {
    const std::uint64_t count = receive_word(kParent);
    if (count == 0) return 0;
    const auto blocks = receive_blocks(kParent, count);
    const double begun = now();
    const auto digests = must(digest_blocks(*device, blocks, late()));
    send_word(kParent, microseconds_since(begun));
    const Digest all = blake3(std::as_bytes(std::span(digests)));
    std::uint64_t word = 0;
    std::memcpy(&word, all.bytes.data(), sizeof(word));
    send_word(kParent, word);
  }
}

// The new worker: opens the blocks; then uploads over them, and changes one bit.
int take() {
  const std::uint64_t count = receive_word(kParent);
  double begun = now();
  const auto device = open_gpu();
  send_word(kParent, microseconds_since(begun));
  const auto files = receive_blocks(kParent, count);
  begun = now();
  std::vector<std::unique_ptr<Block>> blocks;
  for (const BlockFile& file : files) {
    blocks.push_back(must(device->open_block(file.descriptor, file.bytes, Access::kWrite)));
  }
  send_word(kParent, microseconds_since(begun));
  Source source(*device);
  begun = now();
  source.upload(blocks);
  send_word(kParent, microseconds_since(begun));
  const auto stream = must(device->make_stream());
  std::byte byte{};
  const DeviceAddress at = blocks.back()->address() + blocks.back()->bytes() - 7;
  const Download download{.from = at, .to = &byte, .bytes = 1};
  must(stream->download({&download, 1}));
  must(stream->finish(late()));
  byte ^= std::byte{1};
  const Upload upload{.from = &byte, .to = at, .run_bytes = 1};
  must(stream->upload({&upload, 1}));
  must(stream->finish(late()));
  send_word(kParent, 1);
  return 0;
}

struct Checked {
  double seconds = 0;
  std::uint64_t digest = 0;
};
Checked ask(const DeviceChild& checker, const std::vector<BlockFile>& blocks) {
  send_word(checker.socket(), blocks.size());
  send_blocks(checker.socket(), blocks);
  Checked checked;
  checked.seconds = static_cast<double>(receive_word(checker.socket())) / 1e6;
  checked.digest = receive_word(checker.socket());
  return checked;
}

int measure(std::uint64_t gib, std::uint64_t count, int runs) {
  const std::uint64_t bytes = (gib << 30) / count;
  DeviceChild checker("check");
  (void)receive_word(checker.socket());
  std::vector<double> starts, opens, checks, uploads;
  int wrong = 0;
  for (int i = 0; i < runs; ++i) {
    std::vector<BlockFile> blocks;
    {
      DeviceChild worker("fill");
      send_word(worker.socket(), count);
      send_word(worker.socket(), bytes);
      blocks = receive_blocks(worker.socket(), count);
      (void)ask(checker, blocks);
      worker.kill();
    }
    const Checked sealed = ask(checker, blocks);
    DeviceChild next("take");
    send_word(next.socket(), count);
    starts.push_back(static_cast<double>(receive_word(next.socket())) / 1e6);
    const Checked after = ask(checker, blocks);
    wrong += after.digest != sealed.digest;
    checks.push_back(after.seconds);
    send_blocks(next.socket(), blocks);
    opens.push_back(static_cast<double>(receive_word(next.socket())) / 1e6);
    uploads.push_back(static_cast<double>(receive_word(next.socket())) / 1e6);
    (void)receive_word(next.socket());
    wrong += ask(checker, blocks).digest == sealed.digest;
  }
  send_word(checker.socket(), 0);
  const double all = static_cast<double>(gib << 30) / 1e9;
  fmt::print("{} GiB in {} blocks on one GPU, its worker killed, {} runs\n", gib, count, runs);
  fmt::print("  start of CUDA      {:.3f} s\n", median(starts));
  fmt::print("  open all blocks    {:.4f} s\n", median(opens));
  fmt::print("  check all bytes    {:.4f} s  {:.0f} GB/s\n", median(checks), all / median(checks));
  fmt::print("  upload (pinned)    {:.4f} s  {:.0f} GB/s\n", median(uploads),
             all / median(uploads));
  fmt::print("  open + check       {:.3f} of the upload   wrong: {}\n",
             (median(opens) + median(checks)) / median(uploads), wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string script = child_script(argc, argv);
  if (script == "fill") return fill();
  if (script == "check") return check();
  if (script == "take") return take();
  const auto argument = [&](int i, int otherwise) {
    return argc > i ? std::atoi(argv[i]) : otherwise;
  };
  return measure(static_cast<std::uint64_t>(argument(1, 64)),
                 static_cast<std::uint64_t>(argument(2, 64)), argument(3, 5));
}
