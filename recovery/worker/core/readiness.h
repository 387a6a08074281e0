#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "recovery/worker/core/instance.h"

namespace rekindle::worker {

// The state of one instance, as routers see it.
struct Readiness {
  InstanceState state = InstanceState::kAbsent;
  std::optional<ModelVersion> version;
  std::uint64_t generation = 0;
  std::uint32_t world = 0;
  std::optional<std::uint32_t> unfit_rank;
  std::string why;  // when it is not ready

  bool ready() const { return state == InstanceState::kCommitted; }
};
Readiness readiness_of(const Instance& instance);
// One line of JSON without the newline, the same in the file and over HTTP:
// {"instance":"i","ready":true,"state":"COMMITTED","model":"m","version":41,"generation":0,"world":2}
std::string to_json_line(std::string_view instance, const Readiness& readiness);

// An answer of the health endpoint.
struct HealthAnswer {
  int status = 200;
  std::string body;  // one line of JSON with its newline
  bool operator==(const HealthAnswer&) const = default;
};

// The readiness of this agent's instances. The agent as a whole is ready if there is an instance
// and every instance is ready. Instances without a name are not on the board.
class ReadyBoard {
 public:
  void set(const std::string& instance, Readiness readiness);
  void remove(const std::string& instance) { board_.erase(instance); }
  // Answers GET of /health, /ready and /ready/INSTANCE, and 404 for other targets. Ignores a query.
  HealthAnswer get(std::string_view target) const;

 private:
  std::map<std::string, Readiness, std::less<>> board_;
};

}  // namespace rekindle::worker
