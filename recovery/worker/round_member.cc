#include "recovery/worker/round_member.h"

#include <algorithm>
#include <utility>

#include "recovery/rpc/convert.h"

namespace rekindle::worker {

RoundMember::RoundMember(Origin origin) : origin_(std::move(origin)) { id_.model = origin_.model; }

void RoundMember::choose(const ModelVersion& id, std::uint64_t round) {
  chosen_ = id;
  if (round != 0) round_ = round;
}

void RoundMember::join(const device::DeviceJoined& joined, bool owner) {
  id_ = chosen_;
  state_ = proto::ROUND_JOINED;
  joined_ = joined;
  owner_ = owner;
}

bool RoundMember::progress(std::uint64_t bytes) {
  if (bytes <= spread_bytes_) return false;
  spread_bytes_ = bytes;
  return true;
}

void RoundMember::end_spread(const device::SpreadOver& over) {
  kept_bytes_ = over.kept_bytes;
  const bool given_all = !over.error && !over.worker_lost;
  spread_bytes_ = given_all ? joined_.payload_bytes : std::max(spread_bytes_, over.bytes);
}

void RoundMember::fill() {
  if (state_ == proto::ROUND_SPREADING) spread_bytes_ = joined_.payload_bytes;
  state_ = proto::ROUND_FILLED;
  become_ready();
}

void RoundMember::go_alone(const std::string& why) {
  state_ = proto::ROUND_ALONE;
  why_ = why;
  become_ready();
}

void RoundMember::lose_worker(const std::string& why) {
  state_ = proto::ROUND_FAILED;
  worker_lost_ = true;
  why_ = why;
}

void RoundMember::commit() {
  committed_ = true;
  if (round_ == 0) take_chosen();  // without a round; until now it served nothing
  become_ready();
}

void RoundMember::become_ready() {
  const bool over = state_ == proto::ROUND_ALONE || state_ == proto::ROUND_FILLED;
  if (committed_ && over) state_ = proto::ROUND_READY;
}

void RoundMember::leave_round() {
  round_ = 0;
  state_ = proto::ROUND_SERVING;
  worker_lost_ = false;
  why_.clear();
}

bool RoundMember::fail(const std::string& why) {
  ended_ = true;
  why_ = why;
  if (state_ == proto::ROUND_SPREADING) {
    worker_lost_ = true;
    return true;
  }
  if (round_ != 0) take_chosen();
  state_ = proto::ROUND_FAILED;
  return false;
}

bool RoundMember::end_discarding(bool device_failed) {
  if (!worker_lost_ || state_ != proto::ROUND_SPREADING) return false;
  worker_lost_ = !device_failed;
  state_ = proto::ROUND_FAILED;
  return true;
}

bool RoundMember::is_replaced_by(const Origin& newcomer) const {
  return ended_ && !worker_lost_ && origin_.instance == newcomer.instance &&
         origin_.rank == newcomer.rank;
}

std::string_view RoundMember::phase() const {
  if (state_ == proto::ROUND_JOINED) return "joined";
  return state_ == proto::ROUND_SPREADING ? "spreading" : "";
}

proto::RoundMember RoundMember::report(SessionId session, std::uint64_t sequence) {
  if (state_ == proto::ROUND_JOINED && joined_report_ == 0) joined_report_ = sequence;
  proto::RoundMember out;
  out.set_session(session);
  out.set_group(origin_.group);
  out.set_instance(origin_.instance);
  out.set_rank(origin_.rank);
  *out.mutable_id() = rpc::to_proto(id_);
  out.set_device(origin_.device);
  out.set_state(state_);
  // A member that gets the version by the round has not arrived before it has joined.
  if (state_ != proto::ROUND_SERVING) out.set_round(round_);
  *out.mutable_root() = rpc::to_proto(root_);
  *out.mutable_contents() = rpc::to_proto(joined_.contents);
  out.set_payload_bytes(joined_.payload_bytes);
  out.set_bucket_bytes(joined_.bucket_bytes);
  out.set_owner(owner_);
  for (const auto& name : joined_.communicators) out.add_communicators(name);
  out.set_spread_bytes(spread_bytes_);
  out.set_kept_bytes(kept_bytes_);
  out.set_why(why_);
  out.set_worker_lost(worker_lost_);
  return out;
}

}  // namespace rekindle::worker
