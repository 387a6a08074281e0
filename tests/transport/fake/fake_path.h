#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>

#include "src/base/clock.h"
#include "src/base/ids.h"
#include "src/base/unique_fd.h"
#include "tests/transport/fake/fake_transport.h"

namespace rekindle::transport::fake {

// Ops land in order, at the script's speed. A timerfd wakes the poller when the next step is due.
class FakePath final : public Path {
 public:
  FakePath(FakePeer& peer, const SessionToken& token, const Script& script, WriterLedger* ledger,
           UniqueFd timer);
  ~FakePath() override;

  Result<std::size_t> post(std::span<const ReadOp> ops) override;
  std::size_t poll(std::span<Completion> out) override;
  void abort() override;
  std::size_t in_flight() const override { return ops_.size(); }
  std::uint64_t bytes_landed() const override { return landed_; }
  int wait_fd() const override { return script_.pollable ? timer_.get() : -1; }
  std::string_view transport() const override { return "fake"; }
  std::string describe() const override { return "fake -> " + peer_.name(); }

 private:
  struct Op {
    ReadOp read;
    std::uint64_t number = 0;
    TimePoint posted{};
    std::shared_ptr<const Region> region;  // once begun
    std::uint64_t landed = 0;
    OpStatus status = OpStatus::kOk;
    bool begun = false;
  };

  OpStatus begin(Op& op) const;
  void move_bytes(TimePoint now);
  void copy(Op& op, std::uint64_t bytes);
  bool finished(const Op& op, TimePoint now) const;
  void scribble(const Op& op) const;
  void arm_timer(TimePoint now);

  FakePeer& peer_;
  const SessionToken token_;
  const Script script_;
  WriterLedger* const ledger_;
  const UniqueFd timer_;
  std::deque<Op> ops_;
  std::uint64_t taken_ = 0;
  std::uint64_t landed_ = 0;
  TimePoint moved_at_{};  // bytes have moved for the time up to here
  bool broken_ = false;
  bool aborted_ = false;
  TimePoint drained_at_{};  // after abort(): when ops are reported
};

}  // namespace rekindle::transport::fake
