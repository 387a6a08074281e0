#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "recovery/rpc/method_rules.h"
#include "src/async/task.h"
#include "src/base/result.h"

namespace rekindle::proto {
class Right;
class WhoamiResponse;
}  // namespace rekindle::proto

namespace rekindle::rpc {

// The principal of a peer that has proven nothing, on a network that is trusted.
inline constexpr std::string_view kUnproven = "unproven";
// Those of a peer, or `unproven`.
std::vector<std::string> principals_of(const Peer& peer);

// A rights file (docs/guides/operate.md): which principals have which verbs on which models. What
// no line allows is denied. Immutable.
class Rights {
 public:
  // `place` is for messages: the name of the file. kInvalid: one line says where and why.
  static Result<Rights> parse(const std::string& json, const std::string& place);
  static Result<Rights> read(const std::filesystem::path& file);

  // Returns the rule that gives the right. kDenied: there is none. `model` "": the right concerns
  // no model, or all of them, and a line for some models does not give it.
  Result<std::string> allow(std::span<const std::string> principals, Verb verb,
                            const std::string& model) const;
  // The lines that name one of these principals.
  std::vector<proto::Right> lines_of(std::span<const std::string> principals) const;
  std::size_t size() const { return lines_.size(); }

 private:
  struct Line {
    std::vector<std::string> principals;
    std::vector<Verb> verbs;
    // Empty: all models.
    std::vector<std::string> models;
  };

  std::string place_;
  std::vector<Line> lines_;
};

// What a server sees of its caller, without the rights.
proto::WhoamiResponse whoami(const Peer& peer);

}  // namespace rekindle::rpc
