#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "src/base/result.h"
#include "src/bucket/device.h"

struct ncclComm;

// The part of NCCL that a broadcast needs, found at run time. <nccl.h> stays inside nccl.cc. All
// communicators are non-blocking: NCCL works in a thread of its own, and every wait here has a
// deadline.
namespace rekindle::cuda {

class Communicator;
class Context;

// Thread-safe. The library is never unloaded.
class Nccl {
 public:
  // kNotFound: there is no NCCL, or it is older than 2.14.
  static Result<std::shared_ptr<const Nccl>> load(const char* library = "libnccl.so.2");
  ~Nccl();
  Nccl(const Nccl&) = delete;
  Nccl& operator=(const Nccl&) = delete;

  // 22809 is 2.28.9.
  int version() const { return version_; }
  // One rank makes the id and gives it to all ranks.
  using UniqueId = std::array<std::byte, 128>;
  Result<UniqueId> make_id() const;
  // The calls that `body` queues, on any communicators of the calling thread, start together: sends
  // with their receives, and the ranks of one thread with each other. Afterwards wait until
  // each communicator is settled(). `any` is one of them.
  Result<void> group(const Communicator& any, const std::function<Result<void>()>& body) const;

 private:
  friend class Communicator;
  struct Calls;
  explicit Nccl(std::unique_ptr<Calls> calls);
  Error error(int result, ncclComm* communicator, std::string_view what) const;
  // A result of "in progress" is not a failure.
  Result<void> check(int result, ncclComm* communicator, std::string_view what) const;

  const std::unique_ptr<Calls> calls_;
  int version_ = 0;
};

// One device's rank. One thread at a time. After any error, call only abort() or the destructor;
// the peers then have to be told by other means.
class Communicator {
 public:
  struct Rank {
    int rank = 0;
    int ranks = 1;
  };
  // Begins to meet the other ranks, of this thread or others; settled() is true when all have met.
  // The device is one of src/cuda and lives longer. kInvalid: it is not.
  static Result<std::unique_ptr<Communicator>> start(std::shared_ptr<const Nccl> nccl,
                                                     bucket::Device& device, Rank rank,
                                                     const Nccl::UniqueId& id);
  // Aborts.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_.rank; }
  int ranks() const { return rank_.ranks; }

  // These queue work on a stream of the device. settled() must be true before the next call, and
  // before other work is queued behind this one.
  Result<void> broadcast(bucket::DeviceAddress from, bucket::DeviceAddress to, std::uint64_t bytes,
                         int root, bucket::Stream& stream);
  // Gathers `bytes` of each rank, in the order of ranks, at `to`. In place if `from` is its own
  // part.
  Result<void> all_gather(bucket::DeviceAddress from, bucket::DeviceAddress to, std::uint64_t bytes,
                          bucket::Stream& stream);

  // Whether the last call is queued. It also reports later failures, such as kPeerLost, so ask it
  // while the device works as well.
  Result<bool> settled();
  // The queued work ends, and fails.
  void abort();

 private:
  friend class Nccl;
  Communicator(std::shared_ptr<const Nccl> nccl, std::shared_ptr<const Context> context, Rank rank);
  template <typename Call>
  int run(Call&& call) const;

  const std::shared_ptr<const Nccl> nccl_;
  const std::shared_ptr<const Context> context_;
  const Rank rank_;
  ncclComm* communicator_ = nullptr;
};

// Collectives of NCCL, for devices of src/cuda. kNotFound: this host has no NCCL.
Result<std::unique_ptr<bucket::Collectives>> make_nccl_collectives();

}  // namespace rekindle::cuda
