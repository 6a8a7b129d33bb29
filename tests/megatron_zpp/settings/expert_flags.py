"""Flags of mixtures of experts, gpt-oss among them, the setting that each fills, and its value."""

# Beside these, a model with 8 experts has --disable-bias-linear.
OF_EXPERTS = """
--num-experts 8                                      num_experts 8
--moe-layer-freq ([0]*1+[1]*3)                       moe_layer_freq "([0]*1+[1]*3)"
--expert-interval 2                                  moe_layer_freq "[0,1,0,1]"
--moe-ffn-hidden-size 24                             moe_ffn_hidden_size 24
--moe-shared-expert-intermediate-size 48             moe_shared_expert_intermediate_size 48
--moe-shared-expert-gate                             moe_shared_expert_gate true
--moe-router-topk 4                                  moe_router_topk 4
--topk 4                                             moe_router_topk 4
--moe-router-topk-scaling-factor 2.5                 moe_router_topk_scaling_factor 2.5
--moe-router-score-function sigmoid                  moe_router_score_function "sigmoid"
--moe-router-pre-softmax                             moe_router_pre_softmax true
--moe-router-num-groups 4 --moe-router-group-topk 2  moe_router_num_groups 4
--moe-router-group-topk 2 --moe-router-num-groups 4  moe_router_group_topk 2
--moe-router-group-best 1 --moe-router-num-groups 4 --moe-router-group-topk 2 \
    moe_router_group_best 1
--moe-router-enable-expert-bias --moe-router-score-function sigmoid \
    moe_router_enable_expert_bias true
--moe-router-bias-update-rate 0.01                   moe_router_bias_update_rate 0.01
--moe-router-dtype fp32                              moe_router_dtype "fp32"
--moe-router-load-balancing-type seq_aux_loss        moe_router_load_balancing_type ["seq_aux_loss"]
--moe-router-load-balancing-type aux_loss global_aux_loss \
    moe_router_load_balancing_type ["aux_loss", "global_aux_loss"]
--moe-router-force-load-balancing                    moe_router_force_load_balancing true
--moe-aux-loss-coeff 0.01                            moe_aux_loss_coeff [0.01]
--moe-loss-coeff 0.01                                moe_aux_loss_coeff [0.01]
--moe-z-loss-coeff 1e-3                              moe_z_loss_coeff 0.001
--moe-input-jitter-eps 0.1                           moe_input_jitter_eps 0.1
--moe-expert-capacity-factor 1.25                    moe_expert_capacity_factor 1.25
--moe-train-capacity-factor 1.25                     moe_expert_capacity_factor 1.25
--moe-eval-capacity-factor 2                         moe_eval_capacity_factor 2.0
--moe-min-capacity 4                                 moe_min_capacity 4
--moe-token-drop-policy position                     moe_token_drop_policy "position"
--moe-pad-expert-input-to-capacity --moe-expert-capacity-factor 1 \
    moe_pad_expert_input_to_capacity true
--disable-moe-token-dropping                         disable_moe_token_dropping true
--moe-per-layer-logging                              moe_per_layer_logging true
--softmax-type off-by-one                            softmax_type "off-by-one"
--quick-geglu                                        quick_geglu true
--glu-linear-offset 1 --quick-geglu                  glu_linear_offset 1.0
--activation-func-clamp-value 7 --swiglu             activation_func_clamp_value 7.0
"""
