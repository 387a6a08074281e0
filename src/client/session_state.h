#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "src/bucket/contents.h"
#include "src/client/agent_messages.h"
#include "src/client/bucket_feed.h"
#include "src/client/call_table.h"

namespace rekindle::client {

enum class CallState { kUnasked, kAsked, kAnswered, kRefused };

// A request that the agent answers when there is something to say, however long that takes.
template <typename Answer>
class OpenCall {
 public:
  using State = CallState;

  State state() const { return state_; }
  bool is_decided() const { return state_ == State::kAnswered || state_ == State::kRefused; }
  const Answer& answer() const { return answer_; }

  // An answer that came unasked stays.
  void asked(std::uint64_t call) {
    if (state_ == State::kAnswered) return;
    state_ = State::kAsked;
    call_ = call;
  }
  void answered(Answer answer) {
    state_ = State::kAnswered;
    answer_ = std::move(answer);
  }
  // True: the message answers this call.
  bool apply(AgentMessage& message) {
    if (state_ != State::kAsked || message.call != call_) return false;
    state_ = State::kUnasked;
    if (message.error) {
      state_ = State::kRefused;
      refusal_ = std::move(message.error);
    } else if (auto* const reply = std::get_if<Answer>(&message.reply)) {
      answered(std::move(*reply));
    }
    return true;
  }
  // Each once. Afterwards the call may be asked again.
  Answer take_answer() {
    state_ = State::kUnasked;
    return std::move(answer_);
  }
  Error take_refusal() {
    state_ = State::kUnasked;
    return std::move(*refusal_);
  }

 private:
  State state_ = State::kUnasked;
  std::uint64_t call_ = 0;
  Answer answer_;
  std::optional<Error> refusal_;
};

// Threads that take tensors or buckets of one session, one at a time. The session's inbox guards
// it.
class Turns {
 public:
  class Turn {
   public:
    Turn(Turns& turns, Inbox& inbox) : turns_(turns), inbox_(inbox) { turns_.taken_ = true; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() {
      turns_.taken_ = false;
      inbox_.changed.notify_all();
    }

   private:
    Turns& turns_;
    Inbox& inbox_;
  };
  class Waiting {
   public:
    explicit Waiting(Turns& turns) : turns_(turns) { ++turns_.waiting_; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() { --turns_.waiting_; }

   private:
    Turns& turns_;
  };
  bool taken() const { return taken_; }
  bool somebody_waits() const { return waiting_ > 0; }

 private:
  bool taken_ = false;
  std::size_t waiting_ = 0;
};

// Releases the mutex during copies and waits.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<std::mutex>& lock) : lock_(lock) { lock_.unlock(); }
  ~Unlocked() { lock_.lock(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<std::mutex>& lock_;
};

// An attached session as the agent's messages describe it. No I/O; Session guards it.
class SessionState {
 public:
  // `for_device`: verified tiles are also collected for take_verified().
  SessionState(AttachedReply attached, bool for_device);
  // The session's tensors. Called once. Tiles that were reported before count now.
  void describe(bucket::Contents contents);
  bool is_described() const { return contents_.has_value(); }

  void apply(AgentMessage message);
  void end(Error why) { ended_ = std::move(why); }
  bool ended() const { return ended_.has_value(); }
  Result<void> check_alive() const;

  const ModelVersion& version() const { return version_; }
  // After describe(). The texts and places of its pieces never change.
  const bucket::Contents& contents() const { return *contents_; }
  // Indexes of pieces that are whole and were not handed out yet, in the order of completion.
  const std::vector<std::size_t>& complete() const { return complete_; }
  // The first `count` of complete() were handed out.
  void handed_out(std::size_t count);
  // Tiles that have verified since the last call.
  VerifiedTiles take_verified() { return std::exchange(verified_, {}); }

  OpenCall<CommittedReply> commit;
  OpenCall<NewVersion> update;
  OpenCall<OrderReply> order;
  // Whether this rank has reported that it has loaded.
  bool loaded = false;

  // Strings for rk_info(), which live as long as this object.
  const char* rung() const { return rung_; }
  const char* intern(std::string text) { return texts_.insert(std::move(text)).first->c_str(); }

 private:
  void apply_event(AgentMessage message);
  void apply_tiles(TilesReady ready);
  void mark(const VerifiedTiles& tiles);

  const ModelVersion version_;
  const bool for_device_;
  std::optional<bucket::Contents> contents_;
  // Tiles that were reported before describe().
  VerifiedTiles early_;
  std::set<std::string> texts_;
  const char* rung_;
  std::optional<Error> ended_;
  std::vector<std::size_t> complete_;
  VerifiedTiles verified_;
};

}  // namespace rekindle::client
