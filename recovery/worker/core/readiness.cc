#include "recovery/worker/core/readiness.h"

#include <functional>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace rekindle::worker {

namespace {

using Json = nlohmann::ordered_json;

constexpr int kOk = 200;
constexpr int kNotFound = 404;
constexpr int kNotReady = 503;

std::string line(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

Readiness readiness_of(const Instance& instance) {
  Readiness readiness;
  readiness.state = instance.state();
  readiness.version = instance.version();
  readiness.generation = instance.generation();
  readiness.world = instance.world();
  readiness.unfit_rank = instance.unfit_rank();
  readiness.why = instance.why();
  return readiness;
}

std::string to_json_line(std::string_view instance, const Readiness& readiness) {
  Json json{{"instance", std::string(instance)},
            {"ready", readiness.ready()},
            {"state", std::string(to_string(readiness.state))}};
  if (readiness.version) {
    json["model"] = readiness.version->model;
    json["version"] = readiness.version->version;
  }
  json["generation"] = readiness.generation;
  json["world"] = readiness.world;
  if (readiness.unfit_rank) json["rank"] = *readiness.unfit_rank;
  if (!readiness.ready()) json["why"] = readiness.why;
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

void ReadyBoard::set(const std::string& instance, Readiness readiness) {
  board_[instance] = std::move(readiness);
}

HealthAnswer ReadyBoard::get(std::string_view target) const {
  constexpr std::string_view kReadyOf = "/ready/";
  if (const auto query = target.find('?'); query != std::string_view::npos) {
    target = target.substr(0, query);
  }
  if (target == "/health") return {kOk, line({{"healthy", true}})};
  if (target == "/ready") {
    Json why = Json::object();
    for (const auto& [name, readiness] : board_) {
      if (!readiness.ready()) why[name] = readiness.why;
    }
    const bool ready = !board_.empty() && why.empty();
    Json json{{"ready", ready}, {"instances", board_.size()}};
    if (!why.empty()) json["why"] = std::move(why);
    if (board_.empty()) json["why"] = "no worker of a named instance has attached here";
    return {ready ? kOk : kNotReady, line(json)};
  }
  if (target.starts_with(kReadyOf)) {
    const auto name = target.substr(kReadyOf.size());
    if (!check_instance_name(name)) {
      return {kNotFound, line({{"error", "no such instance: the name is none"}})};
    }
    const auto found = board_.find(name);
    if (found == board_.end()) {
      Readiness absent;
      absent.why = "no rank has attached";
      return {kNotReady, to_json_line(name, absent) + "\n"};
    }
    return {found->second.ready() ? kOk : kNotReady, to_json_line(name, found->second) + "\n"};
  }
  return {kNotFound, line({{"error", "GET /health, /ready or /ready/INSTANCE"}})};
}

}  // namespace rekindle::worker
