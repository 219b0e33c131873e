/*
 * Which numbers of an engine's statistics /metrics shows, and under what names.
 * The names, types, labels and bounds are vLLM's where it has them, so that its
 * dashboards and the gateways that read it work; the others begin with llm_.
 */

#include "ngx_module/ngx_http_llm_families.h"


#define llm_at(field)  offsetof(llm_stats_t, field)


const ngx_http_llm_value_t  ngx_http_llm_values[] = {

    { "vllm:num_requests_running", "gauge", NULL,
      "Sequences in the running batch.",
      llm_at(running), NGX_HTTP_LLM_PLAIN },

    { "vllm:num_requests_waiting", "gauge", NULL,
      "Sequences waiting to be scheduled.",
      llm_at(waiting), NGX_HTTP_LLM_PLAIN },

    { "vllm:num_requests_waiting_by_reason", "gauge", "reason=\"capacity\"",
      "Waiting sequences by what they wait for.",
      llm_at(waiting_capacity), NGX_HTTP_LLM_PLAIN },

    { "vllm:num_requests_waiting_by_reason", "gauge", "reason=\"deferred\"",
      NULL,
      llm_at(waiting_deferred), NGX_HTTP_LLM_PLAIN },

    { "vllm:prompt_tokens_total", "counter", NULL,
      "Prompt tokens processed.",
      llm_at(prompt_tokens), NGX_HTTP_LLM_PLAIN },

    { "vllm:prompt_tokens_by_source_total", "counter",
      "source=\"local_compute\"",
      "Prompt tokens by where they came from.",
      llm_at(prompt_computed), NGX_HTTP_LLM_PLAIN },

    { "vllm:prompt_tokens_by_source_total", "counter",
      "source=\"local_cache_hit\"",
      NULL,
      llm_at(prompt_cached), NGX_HTTP_LLM_PLAIN },

    { "vllm:prompt_tokens_cached_total", "counter", NULL,
      "Prompt tokens that were not computed again.",
      llm_at(prompt_cached), NGX_HTTP_LLM_PLAIN },

    { "vllm:prompt_tokens_cached_by_source_total", "counter",
      "source=\"device\"",
      "Prompt tokens that were not computed again, by the memory "
      "they came from.",
      llm_at(prompt_cached), NGX_HTTP_LLM_PLAIN },

    { "vllm:generation_tokens_total", "counter", NULL,
      "Tokens generated.",
      llm_at(generation_tokens), NGX_HTTP_LLM_PLAIN },

    { "vllm:num_preemptions_total", "counter", NULL,
      "Sequences preempted for lack of KV cache pages.",
      llm_at(preemptions), NGX_HTTP_LLM_PLAIN },

    { "vllm:prefix_cache_queries_total", "counter", NULL,
      "Prompt tokens looked up in the prefix cache.",
      llm_at(prefix_queries), NGX_HTTP_LLM_PLAIN },

    { "vllm:prefix_cache_hits_total", "counter", NULL,
      "Prompt tokens found in the prefix cache.",
      llm_at(prefix_hits), NGX_HTTP_LLM_PLAIN },

    { "vllm:request_success_total", "counter", "finished_reason=\"stop\"",
      "Sequences by how they ended.",
      llm_at(finished[LLM_FINISH_STOP]), NGX_HTTP_LLM_PLAIN },

    { "vllm:request_success_total", "counter", "finished_reason=\"length\"",
      NULL,
      llm_at(finished[LLM_FINISH_LENGTH]), NGX_HTTP_LLM_PLAIN },

    { "vllm:request_success_total", "counter", "finished_reason=\"abort\"",
      NULL,
      llm_at(finished[LLM_FINISH_ABORT]), NGX_HTTP_LLM_PLAIN },

    { "vllm:request_success_total", "counter", "finished_reason=\"error\"",
      NULL,
      llm_at(finished[LLM_FINISH_ERROR]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_drafts_total", "counter", NULL,
      "Drafts verified: one for each sequence and step.",
      llm_at(spec_drafts), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_draft_tokens_total", "counter", NULL,
      "Draft tokens verified.",
      llm_at(spec_draft_tokens), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_total", "counter", NULL,
      "Draft tokens accepted.",
      llm_at(spec_accepted), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"0\"", "Draft tokens accepted, by their place in the draft.",
      llm_at(spec_accepted_at[0]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"1\"", NULL,
      llm_at(spec_accepted_at[1]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"2\"", NULL,
      llm_at(spec_accepted_at[2]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"3\"", NULL,
      llm_at(spec_accepted_at[3]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"4\"", NULL,
      llm_at(spec_accepted_at[4]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"5\"", NULL,
      llm_at(spec_accepted_at[5]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"6\"", NULL,
      llm_at(spec_accepted_at[6]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"7\"", NULL,
      llm_at(spec_accepted_at[7]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"8\"", NULL,
      llm_at(spec_accepted_at[8]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"9\"", NULL,
      llm_at(spec_accepted_at[9]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"10\"", NULL,
      llm_at(spec_accepted_at[10]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"11\"", NULL,
      llm_at(spec_accepted_at[11]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"12\"", NULL,
      llm_at(spec_accepted_at[12]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"13\"", NULL,
      llm_at(spec_accepted_at[13]), NGX_HTTP_LLM_PLAIN },

    { "vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter",
      "position=\"14\"", NULL,
      llm_at(spec_accepted_at[14]), NGX_HTTP_LLM_PLAIN },

    { "vllm:admission_rejections_total", "counter",
      "reason=\"max_num_queued_reqs\"",
      "Requests refused because the queue was full.",
      llm_at(rejected), NGX_HTTP_LLM_PLAIN },

    { "llm_preempted_queries_total", "counter", NULL,
      "Tokens of preempted sequences looked up in the prefix cache.",
      llm_at(again_queries), NGX_HTTP_LLM_PLAIN },

    { "llm_preempted_hits_total", "counter", NULL,
      "Tokens of preempted sequences found in the prefix cache.",
      llm_at(again_hits), NGX_HTTP_LLM_PLAIN },

    { "llm_requests_parked", "gauge", NULL,
      "Sequences that wait for a slow client.",
      llm_at(parked), NGX_HTTP_LLM_PLAIN },

    { "llm_slots_used", "gauge", NULL,
      "Request slots the engine holds.",
      llm_at(slots_used), NGX_HTTP_LLM_PLAIN },

    { "llm_kv_pages", "gauge", NULL,
      "KV cache pages in the pool.",
      llm_at(pages_total), NGX_HTTP_LLM_PLAIN },

    { "llm_kv_pages_free", "gauge", NULL,
      "KV cache pages that no sequence holds.",
      llm_at(pages_free), NGX_HTTP_LLM_PLAIN },

    { "llm_kv_pages_used", "gauge", NULL,
      "KV cache pages held by sequences.",
      llm_at(pages_used), NGX_HTTP_LLM_PLAIN },

    { "llm_kv_pages_shared", "gauge", NULL,
      "KV cache pages held by more than one sequence.",
      llm_at(pages_shared), NGX_HTTP_LLM_PLAIN },

    { "llm_kv_pages_cached", "gauge", NULL,
      "KV cache pages that can be found again, held or free.",
      llm_at(pages_cached), NGX_HTTP_LLM_PLAIN },

    { "llm_kv_slots_held", "gauge", NULL,
      "Token slots of the pages held by sequences.",
      llm_at(kv_slots_held), NGX_HTTP_LLM_PLAIN },

    { "llm_kv_slots_used", "gauge", NULL,
      "Token slots that hold a token of a sequence.",
      llm_at(kv_slots_used), NGX_HTTP_LLM_PLAIN },

    { "llm_kv_evictions_total", "counter", NULL,
      "Findable KV cache pages given away for something else.",
      llm_at(evictions), NGX_HTTP_LLM_PLAIN },

    { "llm_steps_total", "counter", NULL,
      "Steps of the engine.",
      llm_at(steps), NGX_HTTP_LLM_PLAIN },

    { "llm_rows_ahead_total", "counter", NULL,
      "Tokens computed before their step was planned.",
      llm_at(rows_ahead), NGX_HTTP_LLM_PLAIN },

    { "llm_rows_ahead_used_total", "counter", NULL,
      "Tokens computed before their step was planned, and used by it.",
      llm_at(rows_ahead_used), NGX_HTTP_LLM_PLAIN },

    { "llm_step_seconds_total", "counter", "phase=\"intake\"",
      "Time that the engine's loop spent, by phase.",
      llm_at(phase_ns[LLM_PHASE_INTAKE]), NGX_HTTP_LLM_NANOS },

    { "llm_step_seconds_total", "counter", "phase=\"schedule\"",
      NULL,
      llm_at(phase_ns[LLM_PHASE_SCHEDULE]), NGX_HTTP_LLM_NANOS },

    { "llm_step_seconds_total", "counter", "phase=\"forward\"",
      NULL,
      llm_at(phase_ns[LLM_PHASE_FORWARD]), NGX_HTTP_LLM_NANOS },

    { "llm_step_seconds_total", "counter", "phase=\"sample\"",
      NULL,
      llm_at(phase_ns[LLM_PHASE_SAMPLE]), NGX_HTTP_LLM_NANOS },

    { "llm_step_seconds_total", "counter", "phase=\"emit\"",
      NULL,
      llm_at(phase_ns[LLM_PHASE_EMIT]), NGX_HTTP_LLM_NANOS },

    { "llm_step_seconds_total", "counter", "phase=\"flush\"",
      NULL,
      llm_at(phase_ns[LLM_PHASE_FLUSH]), NGX_HTTP_LLM_NANOS },

    { NULL, NULL, NULL, NULL, 0, 0 }
};


const ngx_http_llm_histogram_t  ngx_http_llm_histograms[] = {

    { "vllm:time_to_first_token_seconds",
      "Time from the request to its first token.",
      llm_at(ttft), llm_stats_bounds_ttft, NGX_HTTP_LLM_MICROS },

    { "vllm:inter_token_latency_seconds",
      "Time between two tokens of a sequence.",
      llm_at(inter), llm_stats_bounds_inter, NGX_HTTP_LLM_MICROS },

    { "vllm:request_time_per_output_token_seconds",
      "Mean time between the tokens of a sequence, of those with two "
      "or more.",
      llm_at(per_token), llm_stats_bounds_inter, NGX_HTTP_LLM_MICROS },

    { "vllm:e2e_request_latency_seconds",
      "Time from the request to its end.",
      llm_at(e2e), llm_stats_bounds_latency, NGX_HTTP_LLM_MICROS },

    { "vllm:request_queue_time_seconds",
      "Time from the request to its first scheduling.",
      llm_at(queue_time), llm_stats_bounds_latency, NGX_HTTP_LLM_MICROS },

    { "vllm:request_inference_time_seconds",
      "Time from the first scheduling to the last token.",
      llm_at(inference_time), llm_stats_bounds_latency, NGX_HTTP_LLM_MICROS },

    { "vllm:request_prefill_time_seconds",
      "Time from the first scheduling to the first token.",
      llm_at(prefill_time), llm_stats_bounds_latency, NGX_HTTP_LLM_MICROS },

    { "vllm:request_decode_time_seconds",
      "Time from the first token to the last.",
      llm_at(decode_time), llm_stats_bounds_latency, NGX_HTTP_LLM_MICROS },

    { "vllm:iteration_tokens_total",
      "Tokens computed in a step.",
      llm_at(step_tokens), llm_stats_bounds_step, NGX_HTTP_LLM_PLAIN },

    { "vllm:request_prompt_tokens",
      "Prompt tokens of a sequence.",
      llm_at(prompt_len), llm_stats_bounds_tokens, NGX_HTTP_LLM_TOKENS },

    { "vllm:request_generation_tokens",
      "Tokens generated by a sequence.",
      llm_at(output_len), llm_stats_bounds_tokens, NGX_HTTP_LLM_TOKENS },

    { "vllm:request_max_num_generation_tokens",
      "Tokens of the longest of the answers to a prompt.",
      llm_at(max_output), llm_stats_bounds_tokens, NGX_HTTP_LLM_TOKENS },

    { "vllm:request_params_max_tokens",
      "Tokens that a sequence was allowed to generate.",
      llm_at(max_tokens), llm_stats_bounds_tokens, NGX_HTTP_LLM_TOKENS },

    { "vllm:request_params_n",
      "Answers to a prompt.",
      llm_at(params_n), llm_stats_bounds_choices, NGX_HTTP_LLM_PLAIN },

    { "vllm:request_prefill_kv_computed_tokens",
      "Prompt tokens of a sequence that were not found in the cache.",
      llm_at(prefill_len), llm_stats_bounds_tokens, NGX_HTTP_LLM_TOKENS },

    { "vllm:request_num_preemptions",
      "Preemptions of a sequence.",
      llm_at(preempted_times), llm_stats_bounds_times, NGX_HTTP_LLM_PLAIN },

    { NULL, NULL, 0, NULL, 0 }
};

#undef llm_at
