#include "src/base/fair_places.h"

#include <algorithm>

namespace rekindle {

std::size_t places_left(std::size_t places, const PlacesTaken& taken, const std::string& party) {
  std::size_t all = 0;
  for (const auto& [name, count] : taken) all += count;
  if (all < places) return places - all;
  const auto found = taken.find(party);
  const std::size_t own = found == taken.end() ? 0 : found->second;
  const std::size_t parties = taken.size() + (own == 0 ? 1 : 0);
  const std::size_t part = std::max<std::size_t>(places / parties, 1);
  std::size_t within_parts = 0;
  for (const auto& [name, count] : taken) within_parts += std::min(count, part);
  if (own >= part || within_parts >= places) return 0;
  return std::min(part - own, places - within_parts);
}

}  // namespace rekindle
