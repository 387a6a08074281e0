#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "src/tensor/tensor_set.h"

// Tensors as published checkpoints of each model family have them, from a config.json.
namespace rekindle::planner::testing {

std::vector<TensorInfo> model_tensors(std::string_view config_json);

// config.json texts: small ones with the proportions of the real models, one per model_type.
std::string small_config(std::string_view model_type);
// moonshotai/Kimi-K2-Instruct as published.
std::string kimi_k2_config();

}  // namespace rekindle::planner::testing
