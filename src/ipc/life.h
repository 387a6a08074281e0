#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/ipc/unix_socket.h"

// Sees the death of a worker within milliseconds. A thread of the worker holds a robust futex in a
// page that the worker shares with the agent. When the process dies, the kernel marks the word and
// wakes the agent before it tears the memory down, which takes most of a second for a large
// process. Threads do not end during a core dump, so the agent reads /proc as well. The pidfd is
// the backstop. The robust list is our own, not a pthread mutex, because the two ends may run
// different C libraries.
namespace rekindle::ipc {

inline constexpr std::size_t kLifePageBytes = 4096;
inline constexpr std::chrono::milliseconds kLifeLookInterval{20};

// One shared page. The agent creates one per worker and sends its descriptor with AgentHello.
class LifePage {
 public:
  // A memfd sealed against truncation, so that no worker can make the agent fault.
  static Result<std::unique_ptr<LifePage>> create();
  // At the worker. kInvalid unless it is a page that create() made.
  static Result<std::unique_ptr<LifePage>> open(UniqueFd fd);
  ~LifePage();
  LifePage(const LifePage&) = delete;
  LifePage& operator=(const LifePage&) = delete;

  // The page keeps the descriptor.
  int fd() const { return fd_.get(); }
  // The futex word: thread id of the holder | FUTEX_WAITERS | FUTEX_OWNER_DIED. 0: no holder.
  std::uint32_t* word() const;

 private:
  LifePage(UniqueFd fd, void* page) : fd_(std::move(fd)), page_(page) {}
  UniqueFd fd_;
  void* page_;
};

// At the worker: a thread that holds the page's word until the process dies or this object is
// destroyed.
class LifeHold {
 public:
  // Returns when the word is held. kUnavailable: there is no thread, or the kernel has no robust
  // lists. The agent then relies on the pidfd and the socket.
  static Result<std::unique_ptr<LifeHold>> start(std::unique_ptr<LifePage> page);
  // Releases the word in an orderly way, which reports no death.
  virtual ~LifeHold() = default;
};

enum class DeathSign { kFutex, kCoreDump, kPidfd };
// "futex", "core dump", "pidfd".
std::string_view to_string(DeathSign sign);

struct Death {
  std::uint64_t worker = 0;
  DeathSign sign = DeathSign::kFutex;
  // Since the worker was last seen alive: it died at most this long ago.
  Duration unseen{};
};

// At the agent: one thread over all workers. Thread-safe.
class LifeWatch {
 public:
  // Called on the watch's thread, without locks, at most once per worker. Must not throw or wait.
  // It may still be called for a worker that is being removed at that moment.
  using OnDeath = std::function<void(const Death& death)>;

  static Result<std::unique_ptr<LifeWatch>> start(OnDeath on_death);
  // Joins the thread, so not from the callback.
  virtual ~LifeWatch() = default;

  // `worker` is a number that is never used again. `peer` comes from the worker's socket; its pidfd
  // is taken over. An orderly end of LifeHold is not reported: call remove() for workers that
  // detach. kInvalid: the number is known already.
  virtual Result<void> add(std::uint64_t worker, std::unique_ptr<LifePage> page, Peer peer) = 0;
  // Does nothing for a worker that is unknown or dead already.
  virtual void remove(std::uint64_t worker) = 0;
  // Workers that are watched and alive.
  virtual std::size_t size() const = 0;
};

}  // namespace rekindle::ipc
