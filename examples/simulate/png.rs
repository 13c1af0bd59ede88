//! Draws a chart as PNG with its own font, so that every machine draws the same.

use std::error::Error;
use std::sync::Arc;

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::fontdb::Database;
use resvg::usvg::{Options, Tree};

/// Pixels for each unit of the chart, enough for high-resolution screens.
const SCALE: f32 = 2.0;

/// Draws `svg`.
///
/// # Errors
///
/// If `svg` is no SVG, or has no size.
pub(crate) fn png(svg: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let tree = tree(svg)?;
    let size = tree
        .size()
        .to_int_size()
        .scale_by(SCALE)
        .ok_or("it is too large")?;
    let mut pixels = Pixmap::new(size.width(), size.height()).ok_or("it is too large")?;
    resvg::render(
        &tree,
        Transform::from_scale(SCALE, SCALE),
        &mut pixels.as_mut(),
    );
    Ok(pixels.encode_png()?)
}

/// Parses `svg`, with every text laid out.
fn tree(svg: &str) -> Result<Tree, Box<dyn Error>> {
    let mut fonts = Database::new();
    fonts.load_font_data(dejavu::sans_condensed::regular().to_vec());
    fonts.load_font_data(dejavu::sans_condensed::bold().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    Ok(Tree::from_str(
        svg,
        &Options {
            fontdb: Arc::new(fonts),
            ..Options::default()
        },
    )?)
}

#[cfg(test)]
mod tests {
    use resvg::usvg::{Group, Node};
    use tollgate_simulate::{Scenarios, Strategy, picture, sweep};

    use super::*;

    #[test]
    fn png_picture_has_labels_without_installed_fonts() {
        fn texts(group: &Group) -> usize {
            let of = |node: &Node| match node {
                Node::Group(group) => texts(group),
                Node::Text(text) => usize::from(text.flattened().has_children()),
                _ => 0,
            };
            group.children().iter().map(of).sum()
        }
        let public = Scenarios::public().0;
        let (_, n2) = public
            .iter()
            .find(|(name, _)| name == "n2")
            .expect("it is in the public set");
        let strategies = [Strategy::named("fair").unwrap()];
        let runs = sweep(&[("n2".into(), n2.clone())], &strategies, 1..=1, || {}).unwrap();
        let svg = picture("n2", n2, &strategies, &runs, 1).unwrap();
        let labels = svg.matches("<text").count();
        assert!(labels > 30);
        assert_eq!(texts(tree(&svg).unwrap().root()), labels);

        let drawn = |svg: &str| Pixmap::decode_png(&png(svg).unwrap()).unwrap();
        let whole = drawn(&svg);
        let bare = drawn(&svg.replace("<text", "<desc").replace("</text>", "</desc>"));
        let differ = whole
            .pixels()
            .iter()
            .zip(bare.pixels())
            .filter(|(one, other)| one != other)
            .count();
        assert!(
            differ > 100 * labels,
            "{labels} labels make {differ} of {} pixels",
            whole.pixels().len()
        );
    }
}
