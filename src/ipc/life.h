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
#include "src/ipc/peer.h"

// The death of a worker, seen within milliseconds. A thread of the worker holds a robust futex in a
// page that it shares with the agent; when the process dies, the kernel marks the word and wakes
// the agent before it tears the memory down (which for a large process takes most of a second).
// While a core is dumped threads do not end, so that /proc is looked at, too; the pidfd is the
// backstop. The robust list is our own, not a pthread mutex: the two ends may run different C
// libraries.
namespace rekindle::ipc {

inline constexpr std::size_t kLifePageBytes = 4096;
inline constexpr std::chrono::milliseconds kLifeLookInterval{20};

// One shared page. The agent makes one per worker and sends its descriptor with AgentHello.
class LifePage {
 public:
  // A memfd sealed against truncation, so that no worker can make the agent fault.
  static Result<std::unique_ptr<LifePage>> create();
  // At the worker. kInvalid unless it is a page that create() made.
  static Result<std::unique_ptr<LifePage>> open(UniqueFd fd);
  ~LifePage();
  LifePage(const LifePage&) = delete;
  LifePage& operator=(const LifePage&) = delete;

  int fd() const { return fd_.get(); }  // to be sent; stays ours
  // The futex word: thread id of the holder | FUTEX_WAITERS | FUTEX_OWNER_DIED; 0: nobody holds it.
  std::uint32_t* word() const;

 private:
  LifePage(UniqueFd fd, void* page) : fd_(std::move(fd)), page_(page) {}
  UniqueFd fd_;
  void* page_;
};

// At the worker: a thread that holds the page's word until the process dies or this object does.
class LifeHold {
 public:
  // Returns when the word is held. kUnavailable: no thread, or the kernel has no robust lists (the
  // agent then relies on the pidfd and the socket).
  static Result<std::unique_ptr<LifeHold>> start(std::unique_ptr<LifePage> page);
  virtual ~LifeHold() = default;  // lets go in an orderly way: nobody is told of a death
};

enum class DeathSign { kFutex, kCoreDump, kPidfd };
std::string_view to_string(DeathSign sign);  // "futex", "core dump", "pidfd"

struct Death {
  std::uint64_t worker = 0;
  DeathSign sign = DeathSign::kFutex;
  Duration unseen{};  // since it was last seen alive: it died at most this long ago
};

// At the agent: one thread over all workers. Thread-safe.
class LifeWatch {
 public:
  // On the watch's thread, without locks held, at most once per worker; must not throw or wait. It
  // may still come for a worker that is being removed at that moment.
  using OnDeath = std::function<void(const Death& death)>;

  static Result<std::unique_ptr<LifeWatch>> start(OnDeath on_death);
  virtual ~LifeWatch() = default;  // joins: not from the callback

  // `worker` is a number that is never used again. The peer is the one of the worker's socket (its
  // pidfd is taken over). An orderly LifeHold end is not reported; remove() what has detached.
  // kInvalid: the number is known already.
  virtual Result<void> add(std::uint64_t worker, std::unique_ptr<LifePage> page, Peer peer) = 0;
  virtual void remove(std::uint64_t worker) = 0;  // unknown, or dead already: nothing
  virtual std::size_t size() const = 0;           // workers that are watched and alive
};

}  // namespace rekindle::ipc
