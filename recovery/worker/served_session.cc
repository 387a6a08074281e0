#include "recovery/worker/served_session.h"

#include <utility>

namespace rekindle::worker {

void ReadCopy::hand_over(std::shared_ptr<const store::StoredVersion> stored) {
  if (stored == nullptr) return;
  stored_ = std::move(stored);
  if (auto files = stored_->verification->stamp()) files_ = std::move(*files);
}

void ReadCopy::commit(std::shared_ptr<const store::StoredVersion> stored) {
  if (stored_ != nullptr || stored == nullptr) return;
  stored_ = std::move(stored);
  if (auto record = stored_->verification->record()) files_ = std::move(record->files);
}

WorkerSession::CopyKnown ReadCopy::known() const {
  using Known = WorkerSession::CopyKnown;
  if (stored_ == nullptr) return Known::kArriving;
  auto& verification = *stored_->verification;
  const auto record = verification.record();
  const bool same =
      verification.state() == store::CopyState::kVerified && record && record->files == files_;
  return same ? Known::kUnchanged : Known::kChanged;
}

void note(EventLog& events, const Session& session, std::string kind, std::string why) {
  Event event;
  event.kind = std::move(kind);
  event.why = std::move(why);
  event.instance = session.instance;
  event.rank = session.rank();
  event.session = session.id();
  event.pid = session.client->pid();
  if (session.wanted().version != 0) event.version = session.wanted();
  if (session.attach_call == 0) event.rung = std::string(to_string(session.state.rung()));
  event.phases = session.state.phases().at(steady_now());
  events.add(std::move(event));
}

void note_phase(EventLog& events, Session& session) {
  const auto phase = session.state.phases().to_report();
  if (!phase) return;
  note(events, session, *phase == Phase::kReady ? "loaded" : std::string(to_string(*phase)));
}

}  // namespace rekindle::worker
